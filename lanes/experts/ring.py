"""In which order a layer's experts reach a long window, and through which borrowed slots. Pure: numbers in, steps out.

    needed, ascending:   0   1   2*  3*  4   5*  6* ...        * not in the cache: through the ring
    steps:             [ 0   1   2*  3* ][ 4   5*  6* ][ ...   each computed at once, or in parts where rows are many
    slots:                       a   b         c   d           then a again, once the step that read it is over

Experts go in ascending id, resident ones where they are, so a row's sum grows in the one order there is. A step has at
most half of the ring, so that the other half fills while it computes; the first steps of a layer may be copied while
the last ones of the layer before compute, because slots are counted on across layers.

Not here: when copies begin (feed), streams, kernels; whose slots are borrowed (ExpertCache.lend). Invariant: no slot is
written before every step that reads what it held is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

STEP_RECORDS = 32  # of one step, at most: as much as tensor cores need at once; finer steps let the link run on


@dataclass(frozen=True, slots=True)
class Step:
    """Experts first..end-1 of a layer. `number` counts all steps since the ring began."""

    number: int
    first: int
    end: int
    copies: tuple[tuple[int, int], ...]  # (expert, slot): what of them comes through the ring
    after: int  # the copies may begin once so many steps are over


class Ring:
    """Slots 0..slots-1, used in turn for as long as they are borrowed. Steps run in the order of their numbers."""

    def __init__(self, slots: int) -> None:
        assert slots >= 1
        self._slots, self.most = slots, max(1, min(slots // 2, STEP_RECORDS))  # through the ring in one step
        self._readers = [0] * slots  # steps that must be over before a slot is written
        self._next = self._steps = 0

    def after(self, copies: int) -> int:
        """So many steps must be over before a step with so many copies may begin them, were it made now."""
        return max((self._readers[(self._next + n) % self._slots] for n in range(copies)), default=0)

    def step(self, first: int, end: int, experts: Sequence[int]) -> Step:
        """The next step: experts first..end-1, of which these, at most `most`, come through the ring."""
        assert len(experts) <= self.most
        after, copies = self.after(len(experts)), []
        self._steps += 1
        for expert in experts:
            copies.append((expert, self._next))
            self._readers[self._next] = self._steps
            self._next = (self._next + 1) % self._slots
        return Step(self._steps - 1, first, end, tuple(copies), after)

    def layer(self, needed: Iterable[int], resident: Collection[int], experts: int, first: int = 0) -> list[Step]:
        """The steps of experts first..experts-1 of a layer, from the ascending ids of those that will be read."""
        missing = [expert for expert in needed if expert not in resident]
        groups = [missing[at : at + self.most] for at in range(0, len(missing), self.most)] or [[]]
        steps = []
        for group, following in zip(groups, [*groups[1:], [experts]], strict=True):
            steps.append(self.step(first, following[0], group))
            first = following[0]
        return steps
