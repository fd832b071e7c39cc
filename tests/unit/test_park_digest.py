"""Names of parts: by pieces and at once the same, and no two parts that differ have one."""

import numpy as np
import pytest
import xxhash

from shared_experts import park_digest


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(park_digest, "PIECE_BYTES", 8)


def data(count):
    return np.random.default_rng(count).integers(0, 256, count).astype(np.uint8)


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_a_part_of_one_piece_is_called_by_its_bytes(count):
    assert park_digest.of_bytes(data(count)) == xxhash.xxh3_128_digest(data(count).tobytes())


@pytest.mark.parametrize("count", [9, 16, 17, 40])
def test_a_larger_one_by_its_pieces_wherever_they_lie(count):
    runs, at = [], 0
    for number, size in enumerate((3, 8, 1, 12, 100)):
        size = min(size, count - at)
        if size:
            runs.append((50 * number, size))
            at += size
    there, at = np.zeros(500, np.uint8), 0
    for offset, size in runs:
        there[offset : offset + size] = data(count)[at : at + size]
        at += size
    digests = []
    for piece in park_digest.cut(runs):
        digest = xxhash.xxh3_128()
        for offset, size in piece:
            digest.update(there[offset : offset + size].data)
        digests.append(digest.digest())
    assert len(digests) == -(-count // 8)
    name = park_digest.of_bytes(data(count))
    assert park_digest.of_pieces(digests) == name
    for wrong in range(count):
        other = data(count)
        other[wrong] ^= 1
        assert park_digest.of_bytes(other) != name
    swapped = np.concatenate([data(count)[8:], data(count)[:8]])
    assert park_digest.of_bytes(swapped) != name


def test_an_empty_part_is_one_piece():
    assert park_digest.cut([]) == [[]]
    assert park_digest.of_bytes(data(0)) == xxhash.xxh3_128_digest(b"")
