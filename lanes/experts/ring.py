"""In which order a layer's experts reach a long window, and through which borrowed slots. Pure: numbers in, steps out.

    needed, ascending:   0   1   2*  3*  4   5*  6* ...        * not in the cache: through the ring
    steps:             [ 0   1   2*  3* ][ 4   5*  6* ][ ...   each computed at once, or in parts where rows are many
    slots:                       a   b         c   d           then a again, once the step that read it is over

Experts go in ascending id, resident ones where they are, so a row's sum grows in the one order there is. A step has at
most half of the ring, so that the other half fills while it computes; the first steps of a layer may be copied while
the last ones of the layer before compute, because slots are counted on across layers.

Not here: copies, streams, kernels; whose slots are borrowed (ExpertCache.lend). Invariant: no slot is written before
every step that reads what it held is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """Experts first..end-1 of a layer. `number` counts all steps since the ring began."""

    number: int
    first: int
    end: int
    copies: tuple[tuple[int, int], ...]  # (expert, slot): what of them comes through the ring
    after: int  # the copies may begin once so many steps are over


class Ring:
    """Slots 0..slots-1, used in turn for as long as they are borrowed."""

    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots, self._each = slots, max(1, slots // 2)  # through the ring in one step
        self._readers = [0] * slots  # steps that must be over before a slot is written
        self._next = self._steps = 0

    def layer(self, needed: Iterable[int], resident: Collection[int], experts: int) -> list[Step]:
        """The steps of a layer of so many experts, from the ascending ids of those that will be read.

        Before routing is known these may be all: a long window chooses nearly every expert.
        """
        steps: list[Step] = []
        copies: list[tuple[int, int]] = []
        first = after = 0
        for expert in needed:
            if expert in resident:
                continue
            if len(copies) == self._each:
                steps.append(self._step(first, expert, copies, after))
                copies, first, after = [], expert, 0
            slot, self._next = self._next, (self._next + 1) % self._slots
            copies.append((expert, slot))
            after = max(after, self._readers[slot])
            self._readers[slot] = self._steps + 1
        steps.append(self._step(first, experts, copies, after))
        return steps

    def _step(self, first: int, end: int, copies: list[tuple[int, int]], after: int) -> Step:
        self._steps += 1
        return Step(self._steps - 1, first, end, tuple(copies), after)
