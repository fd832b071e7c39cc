"""Digests of places: the native twin equals the truth, which equals the digest of the bytes in one piece."""

import ctypes
import random
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts import park_hand
from shared_experts.park_hand import Native, Stop, plain
from shared_experts.quantiser import load_quantiser

SIZES = [0, 1, 16, 240, 241, 255, 256, 257, 320, 1023, 1024, 1025, 1088, 2048, 2049, 65_536, 65_537, 131_072, 1 << 21]
CUTS = [1, 3, 31, 63, 64, 65, 1000, 1024, 5000, 65_536, 70_000, 1 << 21]


@pytest.fixture(scope="module")
def native():
    return Native(load_quantiser().library)


def places(data, out, cuts, copied, shift):
    found, at, left = [], 0, list(cuts)
    while at < data.shape[0]:
        step = min(data.shape[0] - at, left.pop(0) if left else data.shape[0])
        to = out.ctypes.data + shift + at if copied else 0
        found.append((data.ctypes.data + at, step, to))
        at += step
    return found


def hold(native, size, cuts, copied, shift):
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    truth = xxhash.xxh3_128_digest(data.tobytes())
    for take in (plain, *(lambda given, isa=isa: native(given, Stop(), isa=isa) for isa in native.isas)):
        out = np.zeros(size + 100, np.uint8)
        assert take(places(data, out, cuts, copied, shift)) == truth
        assert np.array_equal(out[shift : shift + size], data) or not copied
        assert not out[:shift].any()
        assert not out[shift + size :].any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("copied", [False, True])
def test_every_kind_of_length(native, size, copied):
    rng = random.Random(size)
    hold(native, size, [], copied, 0)
    hold(native, size, [rng.choice(CUTS) for _ in range(40)], copied, rng.randrange(70))


@settings(max_examples=150, deadline=None)
@given(st.integers(241, 9000), st.lists(st.integers(1, 700), max_size=30), st.booleans(), st.integers(0, 70))
def test_any_places(native, size, cuts, copied, shift):
    hold(native, size, cuts, copied, shift)


def test_it_stops(native):
    data, out = np.ones(3 << 20, np.uint8), np.zeros(3 << 20, np.uint8)
    stop = Stop()
    given_ = places(data, out, [], True, 0)
    assert plain(given_, stop) == native(given_, stop)
    assert not stop.is_set()
    stop.set()
    out[:] = 0
    assert plain(given_, stop) is None
    assert native(given_, stop) is None
    assert not out.any()


def test_the_interpreter_is_free_meanwhile(native):
    data = np.ones(64 << 20, np.uint8)
    inside, turns = threading.Event(), []

    def work():
        inside.set()
        for _ in range(4):
            native(places(data, data, [], False, 0))
        inside.clear()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    while inside.is_set():
        turns.append(1)
    thread.join()
    assert turns


def test_without_the_library_it_is_the_truth(monkeypatch):
    park_hand.load.cache_clear()
    monkeypatch.setattr(park_hand, "load_quantiser", lambda: ctypes.CDLL(None))
    try:
        assert park_hand.load() is plain
    finally:
        park_hand.load.cache_clear()
    assert isinstance(park_hand.load(), Native) or monkeypatch.undo() is None
