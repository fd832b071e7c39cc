"""The index of the park pool: bounded whatever happens, nothing in use goes, shared roots stay longest."""

import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts import limits
from shared_experts.errors import ParkFull, ParkRefused
from shared_experts.park_index import Mark, ParkIndex

A, B = b"a" * 16, b"b" * 16


def name(*parts):
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def park(index, pages, *, tenant=A, holder="lane", at=None, size=1):
    """Parks a conversation of these pages (their names), with marks after page numbers `at`; returns its number."""
    at = at or [len(pages)]
    wanted = [(name("p", *pages[: k + 1]), size) for k in range(len(pages))]
    wanted += [(name("c", *pages[:k]), size) for k in at] + [(name("h", *pages, *at), size)]
    index.lease(holder, tenant, wanted)
    return index.publish(holder, tenant, len(pages), [Mark(64 * k, name("m", *pages[:k]), k) for k in at])


def offered(index):
    return {(e.number, m.tokens) for e in index.changes(0).entries for m in e.marks}


def test_what_is_there_is_not_leased_again():
    index = ParkIndex(100, 1)
    park(index, "root1")
    before = index.used_segments
    answers = index.lease("lane", A, [(name("p", "r"), 1), (name("p", "r", "o"), 1), (name("new"), 3)])
    assert answers[:2] == [True, True]
    assert len(answers[2]) == 3
    assert index.used_segments == before + 3
    assert index.lease("lane", B, [(name("p", "r"), 0)]) == [False], "another tenant's bytes are not there"
    index.abandon("lane")
    assert index.used_segments == before


def test_segments_are_never_shared_by_two_blobs():
    index = ParkIndex(30, 1)
    one = index.lease("x", A, [(b"1" * 16, 10)])[0]
    two = index.lease("y", A, [(b"1" * 16, 10)])[0]
    assert not set(one) & set(two), "what is not published yet is nobody else's"
    index.leave("x")
    index.leave("y")
    assert index.used_segments == 0


def test_the_same_bytes_published_twice_are_kept_once():
    index = ParkIndex(100, 1)
    for holder in "xy":
        index.lease(holder, A, [(b"p" * 16, 5), (b"c" * 16, 1), (b"h" * 16, 1)])
    assert index.used_segments == 14
    for holder in "xy":
        index.publish(holder, A, 1, [Mark(64, b"m" * 16, 1)])
    assert index.used_segments == 7


def test_least_recently_used_goes_first_and_shared_roots_last():
    index = ParkIndex(16, 1)  # a conversation of 4 pages takes 6
    lonely = park(index, "abcd")
    left = park(index, "rsxx", at=[2, 4])  # two pages and a checkpoint in common with the next
    right = park(index, "rsyy", at=[2, 4])
    assert lonely not in {n for n, _ in offered(index)}
    index.evict()  # left, down to nothing: right offers the same root
    assert offered(index) == {(right, 128), (right, 256)}
    index.evict()
    assert offered(index) == {(right, 128)}, "the root stays when its branches are gone"
    assert left != right
    park(index, "efgh")
    assert (right, 128) in offered(index)
    index.evict()
    assert offered(index) == {(right, 128)}, "and longer than a conversation that came later"
    assert index.evict()
    assert not index.evict()
    assert index.used_segments == 0


def test_what_is_pinned_or_leased_stays():
    index = ParkIndex(12, 1)
    first = park(index, "abcd")
    index.pin("reader", first, A)
    index.lease("writer", A, [(b"w" * 16, 6)])
    with pytest.raises(ParkFull):
        index.lease("other", A, [(b"o" * 16, 1)])
    index.unpin("reader", first)
    assert index.lease("other", A, [(b"o" * 16, 1)])[0] is not True
    assert not offered(index)


def test_a_holder_that_is_gone_holds_nothing():
    index = ParkIndex(12, 1)
    first = park(index, "abcd")
    index.pin("reader", first, A)
    index.lease("reader", A, [(b"w" * 16, 6)])
    index.leave("reader")
    assert index.used_segments == 6
    index.lease("other", A, [(b"o" * 16, 12)])
    assert not len(index)


def test_only_its_tenant_takes_a_conversation():
    index = ParkIndex(100, 1)
    number = park(index, "ab")
    with pytest.raises(ParkRefused):
        index.pin("x", number, B)
    with pytest.raises(ParkRefused):
        index.where("x", number, [b"h" * 16])
    index.pin("x", number, A)
    assert index.where("x", number, [name("p", "a"), b"?" * 16])[1] is None


def test_memory_that_was_never_used_is_counted():
    index = ParkIndex(10, 1)
    with pytest.raises(ParkFull):
        index.lease("x", A, [(b"a" * 16, 4)], fresh=3)
    assert index.lease("x", A, [(b"a" * 16, 4)], fresh=4)
    assert index.touched_segments == 4
    index.leave("x")
    assert index.forget_fresh() == [3, 2, 1, 0]
    assert (index.touched_segments, index.used_segments) == (0, 0)


@pytest.mark.parametrize("extra", [0, 1])
def test_entries_are_bounded(monkeypatch, extra):
    monkeypatch.setattr(limits, "PARK_ENTRIES", 3)
    index = ParkIndex(1000, 1)
    for number in range(3 + extra):
        park(index, f"{number}x")
    assert len(index) == 3
    assert (1 in {n for n, _ in offered(index)}) == (extra == 0)


def test_parts_and_marks_are_bounded(monkeypatch):
    index = ParkIndex(1000, 1)
    monkeypatch.setattr(limits, "PARK_BLOBS", 4)
    assert park(index, "ab")
    with pytest.raises(ParkRefused):
        park(index, "abc")
    index.abandon("lane")
    monkeypatch.setattr(limits, "PARK_BLOBS", 100)
    monkeypatch.setattr(limits, "PARK_MARKS", 2)
    assert park(index, "abc", at=[1, 3])
    with pytest.raises(ParkRefused):
        park(index, "abcd", at=[1, 2, 3])


class Mirror:
    def __init__(self):
        self.seen, self.known = 0, {}

    def catch_up(self, index):
        while True:
            news = index.changes(self.seen)
            if news.void:
                self.seen, self.known = 0, {}
                continue
            for number in news.removed:
                self.known.pop(number, None)
            for entry in news.entries:
                self.known[entry.number] = [m.tokens for m in entry.marks]
            self.seen = news.sequence
            if not news.more:
                return


@settings(max_examples=60)
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=5), st.integers(0, 6)), max_size=60), st.integers(8, 40))
def test_whatever_happens_a_mirror_follows_and_segments_are_whole(turns, segments):
    was = limits.PARK_REMOVALS, limits.PARK_MARKS_PER_REPLY
    limits.PARK_REMOVALS, limits.PARK_MARKS_PER_REPLY = 3, 5
    try:
        index, mirror = ParkIndex(segments, 1), Mirror()
        for pages, what in turns:
            try:
                if what == 0:
                    index.evict()
                elif what == 1:
                    index.lease("dying", A, [(name(pages), 2)])
                    index.leave("dying")
                else:
                    park(index, pages, at=sorted({1, len(pages)}), tenant=A if what < 5 else B)
            except ParkFull:
                index.abandon("lane")
            if what > 2:
                mirror.catch_up(index)
                assert mirror.known == {e.number: [m.tokens for m in e.marks] for e in index._by_change.values()}
            used = [s for b in index._blobs.values() for s in b.segments]
            assert len(used) == len(set(used)) == index.used_segments
            assert not any(s in index._free for s in used)
    finally:
        limits.PARK_REMOVALS, limits.PARK_MARKS_PER_REPLY = was


@pytest.mark.parametrize("parts", [2, 40])
def test_whoever_begins_anew_comes_to_an_end(monkeypatch, parts):
    """Old conversations that stay, more than a reply tells, and more removals since than are remembered, or told."""
    monkeypatch.setattr(limits, "PARK_MARKS_PER_REPLY", parts)
    monkeypatch.setattr(limits, "PARK_REMOVALS", 100)
    index = ParkIndex(60, 1)
    kept = [park(index, f"k{number}") for number in range(8)]
    for number in range(300):
        for one in kept:
            index.unpin("reader", index.pin("reader", one, A).number)
        park(index, f"x{number}")
        if number in (20, 90, 299):
            seen, known, calls = 0, set(), 0
            while True:
                news, calls = index.changes(seen), calls + 1
                assert not news.void
                known = (known - set(news.removed)) | {entry.number for entry in news.entries}
                seen = news.sequence
                if not news.more:
                    break
            assert known == {entry.number for entry in index._by_change.values()}
            assert set(kept) < known
            assert calls < 200


def test_ten_thousand_conversations_stay_inside():
    index = ParkIndex(2000, 1)
    for number in range(10_000):
        root = f"r{number % 7}"
        park(index, [root, f"x{number}", f"y{number}"], at=[1, 3], size=3)
        assert index.used_segments <= 2000
        assert len(index) <= limits.PARK_ENTRIES
        assert len(index._blobs) <= 2000
        assert len(index._offers) <= 2000
    roots = {m.chain for e in index.changes(0).entries for m in e.marks if m.tokens == 64}
    assert len(roots) == 7
    index.leave("lane")
    assert not index._holders


def test_names_that_come_after_the_bytes():
    index = ParkIndex(100, 1)
    park(index, "r")
    before = index.used_segments
    places = index.room("lane", A, [1, 2, 3])
    assert [len(place) for place in places] == [1, 2, 3]
    with pytest.raises(ParkRefused):
        index.publish("lane", A, 1, [Mark(64, name("m"), 1)])  # nameless
    index.name("lane", [name("p", "r")])
    assert index.used_segments == before + 5, "it is there: no second place"
    index.name("lane", [name("c"), name("h")])
    with pytest.raises(ParkRefused):
        index.name("lane", [name("x")])
    assert index.lease("other", A, [(name("c"), 0)]) == [False], "seen only once it is published"
    number = index.publish("lane", A, 1, [Mark(128, name("m"), 1)])
    assert index.pin("lane", number, A).pages[0].entries == 2
    assert index.lease("other", A, [(name("c"), 0)]) == [True]


@pytest.mark.parametrize("named", [0, 1, 3])
def test_whoever_dies_before_publishing_leaves_nothing(named):
    index = ParkIndex(100, 1)
    index.room("lane", A, [1, 2, 3])
    index.name("lane", [name(n) for n in range(named)])
    index.leave("lane")
    assert index.used_segments == 0
    assert len(index) == 0


def test_segments_of_a_blob_are_neighbours_again_after_they_were_free():
    index = ParkIndex(12, 1)
    for seed in "ab":
        park(index, seed, size=2)
    while index.evict():
        pass
    for place in index.room("lane", A, [3, 3, 3]):
        assert sum(b - a != 1 for a, b in itertools.pairwise(place)) <= 1
