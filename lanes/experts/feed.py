"""When records are copied into the ring: ahead of the steps that read them, across layers, never into what is read.

    link      L0 a b │ L0 c d │ L0 e f │ L1 a b │ L1 c d │ ...      each pair once the step that read its slots is over
    device           │ L0 step 0 │ L0 step 1 │ ... │ L1 attention │ L1 step 0 │ ...

A pass *ahead* reads nearly every expert: while a layer's last steps and the next layer's attention run, the experts
that are not resident follow one another through the ring, chosen or not, as far as slots are free. Once a layer's
routing is known only what was chosen follows. A pass that is not ahead copies chosen experts only. What is said here
is said ahead of the device, which keeps the order by marks (a slot is free) and arrivals (a record is there).

Not here: which slots (ring), copies and streams (a `Link`). Invariants: a copy begins after the mark of the last step
that read its slots; steps are over in the order in which they were made.

Letters: L layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lanes.experts.ring import Ring, Step
from lanes.experts.slots import Arrival, Mark


class Link(Protocol):
    """Copies into the ring's slots; calls say what shall happen, and wait for nothing."""

    def mark(self) -> Mark:
        """All that the device has been given so far."""

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], after: Mark) -> Arrival:
        """Copies (expert, slot) of a layer, once the device is past the mark."""


class Feed:
    """Of one window. For every layer: `begun`, `rest`, and for each of their steps `arrive`, what computes it, `over`.

    The steps that `begun` gives may be over before `rest` is asked for.
    """

    def __init__(self, slots: int, resident: npt.NDArray[np.bool_], link: Link, ahead_layers: int = 0) -> None:
        """resident [L, E] must not change meanwhile. Layers 0..ahead_layers-1 are copied ahead, from now on."""
        self._ring, self._link = Ring(slots), link
        self._resident, self._experts = resident, resident.shape[1]
        self._ahead_layers, self._layer = ahead_layers, 0  # the layer that is copied ahead next
        self._ahead: dict[int, list[Step]] = {}  # begun before their layer's routing was known
        self._waiting: deque[tuple[int, Step]] = deque()
        self._arrivals: dict[int, Arrival] = {}
        self._marks = [link.mark()]  # n: n steps are over
        self._open: tuple[int, int] | None = None  # (layer, first expert) whose rest is not known yet
        self._advance()

    def begun(self, layer: int) -> list[Step]:
        """The layer's first steps, whose copies have begun whatever its rows will choose: none more do until `rest`."""
        assert not self._waiting, "the layer before is not over"
        assert self._open is None, "the layer before has no rest yet"
        if self._ahead and next(iter(self._ahead)) != layer:
            self._abandon()
        begun = self._ahead.pop(layer, [])
        self._open = layer, begun[-1].end if begun else 0
        return begun

    def rest(self, needed: Sequence[int]) -> list[Step]:
        """The steps behind those that `begun` gave; `needed` are the ascending ids that the layer's rows chose."""
        assert self._open is not None, "of which layer?"
        (layer, first), self._open = self._open, None
        rest: list[Step] = []
        if first < self._experts:
            resident = set(np.flatnonzero(self._resident[layer]).tolist())
            rest = self._ring.layer([e for e in needed if e >= first], resident, self._experts, first)
            self._waiting.extend((layer, step) for step in rest)
            self._layer = layer + 1
        self._advance()
        return rest

    def steps(self, layer: int, needed: Sequence[int]) -> list[Step]:
        """All of a layer's steps, where nothing is made of those that have begun before `needed` is known."""
        return self.begun(layer) + self.rest(needed)

    def arrive(self, step: Step) -> None:
        """What the device is given from here on runs once the step's records are there."""
        if step.copies:
            self._arrivals.pop(step.number).join()

    def over(self, step: Step) -> None:
        """The device has been given all that reads the step's records."""
        assert step.number == len(self._marks) - 1, "steps are over in turn"
        self._marks.append(self._link.mark())
        self._advance()

    def _advance(self) -> None:
        """Begins every copy whose slots are free."""
        while self._waiting and self._waiting[0][1].after < len(self._marks):
            self._begin(*self._waiting.popleft())
        if self._open is not None and self._open[1] < self._experts:
            return  # the next copies are that layer's
        while not self._waiting and self._layer < self._ahead_layers and self._run_ahead(self._layer):
            pass

    def _run_ahead(self, layer: int) -> bool:
        """Begins another step of a layer whose routing is not known; False where its slots are not free."""
        begun = self._ahead.setdefault(layer, [])
        first = begun[-1].end if begun else 0
        missing = first + np.flatnonzero(~self._resident[layer, first:])[: self._ring.most + 1]
        group, end = missing[: self._ring.most].tolist(), self._experts
        if len(missing) > self._ring.most:
            end = int(missing[-1])
        if self._ring.after(len(group)) >= len(self._marks):
            return False
        begun.append(self._ring.step(first, end, group))
        self._begin(layer, begun[-1])
        if end == self._experts:
            self._layer += 1
        return True

    def _begin(self, layer: int, step: Step) -> None:
        if step.copies:
            self._arrivals[step.number] = self._link.copy(layer, step.copies, self._marks[step.after])

    def _abandon(self) -> None:
        """Another layer came than was expected: nobody will read what was copied ahead."""
        for steps in self._ahead.values():
            for step in steps:
                self._arrivals.pop(step.number, None)
                self._marks.append(self._link.mark())
        self._ahead.clear()
