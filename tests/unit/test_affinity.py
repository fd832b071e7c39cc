from __future__ import annotations

from coordinator.policy.affinity import Seat, SessionAffinity

A, B = Seat("lane-0", b"a"), Seat("lane-1", b"b")


def test_remembers_the_last_seat() -> None:
    affinity = SessionAffinity(10)
    assert affinity.seat("s") is None
    affinity.remember("s", A)
    affinity.remember("s", B)
    assert affinity.seat("s") == B


def test_no_session_has_no_seat() -> None:
    affinity = SessionAffinity(10)
    affinity.remember(None, A)
    assert affinity.seat(None) is None
    assert len(affinity) == 0


def test_forgets_the_least_recently_used_at_the_bound() -> None:
    affinity = SessionAffinity(2)
    affinity.remember("s", A)
    affinity.remember("t", A)
    affinity.remember("s", B)  # used again
    affinity.remember("u", A)
    assert [affinity.seat(name) for name in "stu"] == [B, None, A]
    assert len(affinity) == 2
