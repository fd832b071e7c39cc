"""A thousand flipped bits: each is refused when the pack is opened or verified, or lies where it can do no harm."""

import random

import pytest

from shared_experts.convert import convert
from shared_experts.errors import PackError
from shared_experts.pack import Pack
from tests.fakes.checkpoints import small_checkpoint

FLIPS = 1000


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    small_checkpoint(folder / "c", tokenizer=True)
    convert(folder / "c", folder / "p", experts="q4g32")
    (folder / "p" / "notes.txt").write_text("beside the pack, in no section")
    return folder / "p"


def covered_bytes(pack):
    """Every byte of the pack's own files is in a section or in the manifest: nothing is outside a digest."""
    with Pack.open(pack) as opened:
        by_file = {}
        for section in opened.manifest.sections:
            by_file.setdefault(section.file, []).append((section.offset, section.offset + section.bytes))
    for name, spans in by_file.items():
        end = 0
        for start, stop in sorted(spans):
            assert start == end, (name, start, end)
            end = stop
        assert end == (pack / name).stat().st_size, name
    return sorted([*by_file, "manifest.msgpack"])


def accepted(pack):
    """The fingerprint of a pack that opens and verifies; raises PackError."""
    with Pack.open(pack) as opened:
        opened.verify(threads=1)
        return opened.fingerprint


def flip(path, position, bit):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def test_a_thousand_flipped_bits_are_refused(pack):
    """As many in every file as in every other, small ones included, so that each kind of digest is tried."""
    random_ = random.Random(20)
    files, good = covered_bytes(pack), accepted(pack)
    for number in range(FLIPS):
        path = pack / files[number % len(files)]
        position, bit = random_.randrange(path.stat().st_size), random_.randrange(8)
        flip(path, position, bit)
        with pytest.raises(PackError) as refusal:
            accepted(pack)
        assert path.name in str(refusal.value), (path.name, position, bit)
        flip(path, position, bit)
    assert accepted(pack) == good


def test_what_is_outside_every_digest_changes_nothing(pack):
    good = accepted(pack)
    with Pack.open(pack) as opened:
        before = {name: opened.file(name) for name in ("tokenizer.json", "notes.txt")}
        assert before["notes.txt"] is None
    for position in range(0, 30, 3):
        flip(pack / "notes.txt", position, position % 8)
        assert accepted(pack) == good
        with Pack.open(pack) as opened:
            assert {name: opened.file(name) for name in before} == before
