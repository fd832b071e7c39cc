"""Small files of a pack: bounded, regular, read without waiting for anybody."""

import hashlib
import os

import pytest

from coordinator.errors import BadPack, BadTokenizer
from coordinator.generation_config import GenerationConfig
from coordinator.pack_file import read_pack_file
from coordinator.text.chat_format import ChatFormat
from coordinator.text.tokenizer import Tokenizer


def test_at_the_limit_and_one_past_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 9)
    assert read_pack_file(path, 9) == b"x" * 9
    with pytest.raises(ValueError, match="over 8 bytes"):
        read_pack_file(path, 8)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_pack_file(tmp_path / "file", 9)


def test_a_pipe_without_a_writer_does_not_keep_the_reader_waiting(tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match="not a regular file"):
            read_pack_file(tmp_path / name, 9)
    with pytest.raises(BadTokenizer, match="not a regular file"):
        Tokenizer.load(tmp_path)
    assert GenerationConfig.load(tmp_path) == GenerationConfig()


def test_only_what_the_manifest_names_and_as_it_has_it(tmp_path):
    digests = {}
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"{}")
        digests[name] = hashlib.sha256(b"{}").hexdigest()
    assert read_pack_file(tmp_path / "tokenizer.json", 9, digests) == b"{}"
    (tmp_path / "chat_template.jinja").write_bytes(b"<think>")  # laid beside the pack by somebody else
    assert ChatFormat.load(tmp_path).thinks
    assert not ChatFormat.load(tmp_path, digests).thinks
    for name, load in (
        ("tokenizer.json", Tokenizer.load),
        ("generation_config.json", GenerationConfig.load),
        ("tokenizer_config.json", ChatFormat.load),
    ):
        (tmp_path / name).write_bytes(b"[]")
        with pytest.raises(BadPack, match=f"{name}: not the file that the pack was made with"):
            load(tmp_path, digests)
        os.unlink(tmp_path / name)
        if name != "tokenizer.json":
            load(tmp_path, digests)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        read_pack_file(tmp_path, 9)
