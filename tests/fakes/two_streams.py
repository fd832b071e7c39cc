"""A device with two streams, in thought: one copies into slots, one computes from them, and either may be late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lanes.experts.slots import Took


@dataclass
class Waiting:
    """Of copies; implements `lanes.experts.slots.Arrival`."""

    device: TwoStreams
    number: int

    def here(self) -> bool:
        return self.device.copied > self.number

    def join(self) -> None:
        self.device.give(ready=self.here)

    def took(self) -> Took:
        return Took()


class TwoStreams:
    """Implements `lanes.experts.feed.Link`; `finish` runs everything in an order that `pick` chooses."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}  # slot: (layer, expert)
        self.asked: list[tuple[int, int]] = []  # every copy, in order
        self.copied = self.computed = 0
        self._copies: list[tuple[int, int, Sequence[tuple[int, int]]]] = []  # (mark, layer, (expert, slot) each)
        self._work: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def mark(self) -> int:
        return len(self._work)

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], after: int) -> Waiting:
        self._copies.append((after, layer, copies))
        self.asked += [(layer, expert) for expert, _ in copies]
        return Waiting(self, len(self._copies) - 1)

    def give(self, do: Callable[[], None] = lambda: None, ready: Callable[[], bool] = lambda: True) -> None:
        """Work for the computing stream."""
        self._work.append((ready, do))

    def reads(self, layer: int, copies: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """What a step does: it finds its records."""

        def check() -> None:
            assert {slot: self.held.get(slot) for _, slot in copies} == {s: (layer, e) for e, s in copies}

        return check

    def finish(self, pick: Callable[[], bool]) -> None:
        """`pick` says whether the copying stream is next, where either could go on."""
        while self.copied < len(self._copies) or self.computed < len(self._work):
            may_copy = self.copied < len(self._copies) and self._copies[self.copied][0] <= self.computed
            may_compute = self.computed < len(self._work) and self._work[self.computed][0]()
            assert may_copy or may_compute, "both streams wait for each other"
            if may_copy and (not may_compute or pick()):
                _, layer, copies = self._copies[self.copied]
                self.held |= {slot: (layer, expert) for expert, slot in copies}
                self.copied += 1
            else:
                self._work[self.computed][1]()
                self.computed += 1
