"""What owners keep of a pack's damage: found again at once while the file is the same one, forgotten otherwise."""

import json
import os

import pytest

from shared_experts import limits
from shared_experts.damage import DamageRecord
from shared_experts.errors import PackError

PACK = b"f" * 32


@pytest.fixture
def kept(tmp_path):
    table = tmp_path / "ngram.bin"
    table.write_bytes(b"x")
    record = DamageRecord(tmp_path / "record", PACK)
    record.keep(PackError(table, "damaged", section="ngram.1"))
    return record, table


def test_a_successor_finds_the_same_at_once(kept):
    record, _ = kept
    for _ in range(2):
        with pytest.raises(PackError, match=r"ngram\.bin: section 'ngram\.1': found while lanes ran: damaged"):
            record.check()


@pytest.mark.parametrize("change", ["replaced", "touched", "gone", "another pack"])
def test_it_is_forgotten_when_the_file_is_another_one(kept, change):
    record, table = kept
    match change:
        case "replaced":
            (new := table.with_name("new")).write_bytes(b"y")
            os.replace(new, table)
        case "touched":
            os.utime(table, ns=(1, 1))
        case "gone":
            table.unlink()
        case "another pack":
            record = DamageRecord(record.path, b"g" * 32)
    record.check()
    assert not record.path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "1", '{"file": 1}', '{"file": []}', "[" * 10_000, "\x00"])
def test_a_record_that_cannot_be_read_is_none(kept, text):
    record, _ = kept
    record.path.write_text(text)
    record.check()
    assert not record.path.exists()


def test_a_record_over_the_limit_is_none(kept):
    record, _ = kept
    text = record.path.read_text()
    record.path.write_text(text.ljust(limits.DAMAGE_RECORD_BYTES))
    with pytest.raises(PackError):
        record.check()
    padded = json.dumps({**json.loads(text), "more": "x" * limits.DAMAGE_RECORD_BYTES})
    record.path.write_text(padded)
    record.check()
    assert not record.path.exists()


def test_a_directory_that_is_gone_fails_nobody(kept, tmp_path):
    record = DamageRecord(tmp_path / "no" / "record", PACK)
    record.keep(PackError(tmp_path / "ngram.bin", "damaged"))
    record.check()
