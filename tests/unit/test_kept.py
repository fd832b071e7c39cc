"""Where conversations are kept: the longest of each place, of the sessions that asked last."""

from __future__ import annotations

import pytest

from coordinator import limits
from coordinator.policy.kept import Conversations, Kept
from coordinator.policy.prefixes import Prefix, PrefixIndex

CHAINS = [bytes([n]) * 16 for n in range(1, 5)]  # of four blocks of 64


def test_the_longest_of_each_place() -> None:
    index, talks = PrefixIndex(), Conversations()
    talks.asked("ann", "a", 270, CHAINS, 5.0)
    assert talks.kept(index) == [Kept("ann", "a", 5.0, 270, {}, 0)]
    index.add("lane-0", [Prefix(CHAINS[0], 64), Prefix(CHAINS[2], 200), Prefix(CHAINS[1], 130, parked=True)])
    index.add("lane-1", [Prefix(CHAINS[3], 256), Prefix(CHAINS[3], 300)])  # it has gone on after the prompt
    index.add("lane-2", [Prefix(b"x" * 16, 64), Prefix(CHAINS[2], 192, parked=True)])
    assert talks.kept(index) == [Kept("ann", "a", 5.0, 270, {"lane-0": 200, "lane-1": 270}, 192)]
    index.forget("lane-2")
    index.remove("lane-1", [Prefix(CHAINS[3], 300)])
    assert talks.kept(index) == [Kept("ann", "a", 5.0, 270, {"lane-0": 200, "lane-1": 256}, 130)]


def test_sessions_are_their_tenants_and_the_last_prompt_counts() -> None:
    index, talks = PrefixIndex(), Conversations()
    talks.asked("ann", "a", 64, CHAINS[:1], 1.0)
    talks.asked("bob", "a", 64, CHAINS[:1], 2.0)
    talks.asked("ann", "a", 130, CHAINS[:2], 3.0)
    assert [(kept.tenant, kept.prompt_tokens, kept.asked_s) for kept in talks.kept(index)] == [
        ("ann", 130, 3.0), ("bob", 64, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_as_the_limit(more: int) -> None:
    talks = Conversations()
    for number in range(limits.PAGE_CONVERSATIONS + more):
        talks.asked("ann", f"s{number}", 64, (), float(number))
    kept = talks.kept(PrefixIndex())
    assert len(kept) == limits.PAGE_CONVERSATIONS
    assert kept[-1].session == f"s{more}"
