"""Small files of a pack: bounded, regular, read without waiting for anybody."""

import os

import pytest

from coordinator.errors import BadTokenizer
from coordinator.generation_config import GenerationConfig
from coordinator.pack_file import read_pack_file
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


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        read_pack_file(tmp_path, 9)
