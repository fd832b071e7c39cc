from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator import limits
from coordinator.generation_config import FILE_NAME, PLAIN, GenerationConfig
from coordinator.sampling import Defaults

QWEN = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "transformers_version": "5.0.0",
}  # fmt: skip


def test_what_the_makers_recommend() -> None:
    found = GenerationConfig.parse(QWEN)
    assert found.defaults == Defaults(0.7, 20, 0.8, 0.0, 1.05)
    assert found.end_ids == (151645, 151643)


def test_without_a_file_or_a_word_all_is_plain(tmp_path: Path) -> None:
    assert GenerationConfig.load(tmp_path) == GenerationConfig.parse({}) == GenerationConfig(PLAIN, ())
    assert Defaults(temperature=1.0) == PLAIN
    assert GenerationConfig.parse({"do_sample": False, "temperature": None}).defaults == PLAIN


def test_one_end_id() -> None:
    assert GenerationConfig.parse({"eos_token_id": 7}).end_ids == (7,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", 2.5), ("temperature", True),
        ("temperature", float("nan")), ("temperature", 10**400), ("top_p", 0), ("top_p", 1.5), ("top_k", 2.5),
        ("top_k", -2), ("top_k", [1]), ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", {}),
        ("eos_token_id", -1), ("eos_token_id", "x"), ("eos_token_id", [1, True]), ("eos_token_id", {"a": 1}),
        ("eos_token_id", list(range(limits.END_IDS + 1))), ("eos_token_id", 1 << 32),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_ignored_and_named(capsys: pytest.CaptureFixture[str], field: str, value: Any) -> None:
    rest = {name: other for name, other in QWEN.items() if name != field}
    assert GenerationConfig.parse(rest | {field: value}) == GenerationConfig.parse(rest)
    assert field in capsys.readouterr().out


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 60_000, b'{"a": 1}' + b" " * limits.GENERATION_CONFIG_BYTES]
)
def test_a_file_that_cannot_be_read_stops_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    assert GenerationConfig.load(tmp_path) == GenerationConfig()


def test_size_at_the_limit(tmp_path: Path) -> None:
    text = json.dumps({"top_k": 5})
    (tmp_path / FILE_NAME).write_text(text + " " * (limits.GENERATION_CONFIG_BYTES - len(text)))
    assert GenerationConfig.load(tmp_path).defaults.top_k == 5


def test_a_directory_of_that_name_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert GenerationConfig.load(tmp_path) == GenerationConfig()
