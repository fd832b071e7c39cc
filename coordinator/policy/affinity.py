"""Which lane a session was last served by. Pure.

Not here: what a lane still remembers of the session, and whether to go there (scheduler). Invariant: never more than
`bound` sessions, the least recently used one is forgotten first; a seat names one process of the lane, so that a
session does not cling to a lane that died and came back empty.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """One process of one lane."""

    lane: str
    incarnation: bytes


class SessionAffinity:
    """Session -> seat, least recently used first."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._seats: OrderedDict[str, Seat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seats)

    def seat(self, session: str | None) -> Seat | None:
        """Where the session was served last; asking does not count as use."""
        return self._seats.get(session) if session is not None else None

    def remember(self, session: str | None, seat: Seat) -> None:
        """The session is being served there."""
        if session is None:
            return
        self._seats[session] = seat
        self._seats.move_to_end(session)
        if len(self._seats) > self._bound:
            self._seats.popitem(last=False)
