"""When lanes changed their state: the page's memory of deaths and returns. Pure.

Not here: why (fleet). Invariant: the latest `limits.PAGE_CHANGES` are kept, of every lane the time of its last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator import limits
from coordinator.fleet.lane_view import LaneView


@dataclass(frozen=True, slots=True)
class Change:
    """A lane's state from `at_s` on."""

    at_s: float
    lane: str
    before: str  # empty: it was not there
    after: str


class Changes:
    """`look` at the lanes after every change."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, bytes]] = {}
        self._since_s: dict[str, float] = {}
        self.latest: deque[Change] = deque(maxlen=limits.PAGE_CHANGES)  # the latest last

    def look(self, views: Iterable[LaneView], now: float) -> None:
        """Take over how they are."""
        for view in views:
            before = self._states.get(view.name)
            known = (view.state, view.incarnation)
            if before is not None and before[0] == "ready" == view.state and before[1] != view.incarnation:
                self._note(Change(now, view.name, before[0], "dead"))  # another process between two looks
                before = ("dead", b"")
            if before is None or before[0] != view.state:
                self._note(Change(now, view.name, before[0] if before else "", view.state))
            self._states[view.name] = known

    def since_s(self, lane: str, now: float) -> float:
        """How long it has been in its state."""
        return max(0.0, now - self._since_s.get(lane, now))

    def _note(self, change: Change) -> None:
        self._since_s[change.lane] = change.at_s
        self.latest.append(change)
