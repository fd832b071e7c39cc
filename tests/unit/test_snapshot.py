"""Snapshots as bytes: what goes in comes out, and no bytes make the parser do more than refuse."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.state import snapshot
from lanes.state.errors import SnapshotRefused
from lanes.state.sequence import SequenceState
from lanes.state.snapshot import Header, Identity, SavedMark
from tests.fakes.states import SHAPE, fresh, same

WHO, TENANT = Identity.of(b"f" * 32, SHAPE), b"t" * 16
IDS = np.arange(300, dtype=np.uint32)
GOOD = Header(WHO, TENANT, IDS, (b"1" * 16, b"2" * 16), (SavedMark(256, 1, b"3" * 16), SavedMark(300, 2, b"4" * 16)))


def decoded(data, **changes):
    asked = {"identity": WHO, "tenant": TENANT, "most_tokens": 1000} | changes
    return Header.decode(data, **asked)


def test_a_header_comes_back_whole():
    found = decoded(GOOD.encode())
    assert np.array_equal(found.ids, IDS)
    assert (found.pages, found.marks) == (GOOD.pages, GOOD.marks)


@pytest.mark.parametrize(
    "changes",
    [{"identity": Identity(b"g" * 32, WHO.layout)}, {"identity": Identity(b"f" * 32, b"x" * 16)},
     {"tenant": b"u" * 16}, {"most_tokens": 299}],
)  # fmt: skip
def test_what_is_not_ours_is_refused(changes):
    with pytest.raises(SnapshotRefused):
        decoded(GOOD.encode(), **changes)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_refused(data):
    with pytest.raises(SnapshotRefused):
        decoded(data)


@given(st.data())
def test_a_changed_header_is_refused_or_says_what_it_says(data):
    good = GOOD.encode()
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    cut = changed[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else changed
    try:
        found = decoded(cut)
    except SnapshotRefused:
        return
    assert found.encode() == cut
    assert all(0 < mark.tokens <= found.ids.shape[0] for mark in found.marks)


def test_sizes_that_lie_are_refused():
    good = GOOD.encode()
    for tokens, marks in ((0, 2), (2**32 - 1, 2), (300, 2**32 - 1), (299, 2), (300, 3)):
        at = len(good) - len(good) + 8 + 4 + 32 + 16 + 16
        with pytest.raises(SnapshotRefused):
            decoded(good[:at] + struct.pack("<II", tokens, marks) + good[at + 8 :])


@pytest.mark.parametrize("until", [1, 5, 16, 17, 37])
def test_pages_and_checkpoints_make_the_same_state(monkeypatch, until):
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    ids = [n * 7 % 50 for n in range(37)]
    source, target = fresh(ids), SequenceState(SHAPE, 64)
    truth = fresh(ids[:until])
    target.reserve(until)
    for page in range(-(-until // 16)):
        first, end = snapshot.page_range(page, 37)
        data = snapshot.pack(source.rows(first, end))
        assert data.nbytes == snapshot.page_bytes(SHAPE, first, end)
        snapshot.unpack_page(data, target, first, end, until)
    data = snapshot.pack(truth.fixed())
    assert data.nbytes == snapshot.fixed_bytes(truth)
    snapshot.unpack_fixed(data, target)
    target.draft.waiting, target.length = truth.draft.waiting, until
    assert same(target, truth)
