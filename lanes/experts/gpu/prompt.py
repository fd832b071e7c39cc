"""The routed experts of windows with many rows: grouped by expert, the missing ones copied through borrowed slots.

    begin_window     slots are borrowed; of a pass ahead the first copies begin, under what precedes the first experts
    expect(ids)      the rows' sorting by expert begins; what it says to the host is awaited by
    forward(layer)   group the rows ─▶ steps ─▶ each: its copies are there, it runs, its slots are free for the next
                     between what the host awaits and the first step's launches it does next to nothing
    end_window       the slots go back, however the window ended

Not here: which way pays (lanes.reading), kernels (lanes.kernels.grouped), the order and the slots (lanes.experts.ring),
when copies begin (lanes.experts.feed), counters.
Invariants: results are those of the decode kernels to the bit; slots are borrowed for one window at most; nothing is
copied on the computing stream (lanes.kernels.places says why).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.experts.cache import ExpertCache
from lanes.experts.feed import Feed
from lanes.experts.gpu.prelude import Prelude
from lanes.experts.ring import Step
from lanes.experts.slots import Arrival, Mark
from lanes.kernels import experts, grouped, places
from lanes.kernels.fetch import fetch
from lanes.kernels.places import Asked
from lanes.kernels.rows import QuantisedRows
from shared_experts.manifest import ExpertsInfo

# At most one slot of so many is borrowed: a slot more in the ring costs one record more a chunk; a ring that is full
# before a layer's attention is over costs the link its time in every layer (tests/unit/test_prompt_timeline.py).
RING_SHARE = 3


@dataclass(frozen=True, slots=True)
class Means:
    """How a pass is fed: whether every layer's experts come ahead of its routing, and through how many slots."""

    ahead: bool
    slots: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a window's copies were: records, nanoseconds on the link, and how long the device waited for them."""

    records: int = 0
    copying_ns: int = 0
    waiting_ns: int = 0


class Borrowed:
    """Slots of a cache while one window has them; implements `lanes.experts.feed.Link`."""

    def __init__(self, cache: ExpertCache, slots: Sequence[int], prelude: Prelude) -> None:
        self._cache, self._slots, self.prelude = cache, slots, prelude
        self._experts = cache.addresses.shape[1]
        self._arrivals: list[Arrival] = []
        self._records = 0

    def address(self, slot: int) -> int:
        """Of a slot of the ring."""
        return self._cache.address(self._slots[slot])

    def mark(self) -> Mark:
        """Of the cache's memory."""
        return self._cache.mark()

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], after: Mark) -> Arrival:
        """From the region."""
        first = layer * self._experts
        arrival = self._cache.fetch([(first + expert, self._slots[slot]) for expert, slot in copies], after)
        self._arrivals.append(arrival)
        self._records += len(copies)
        return arrival

    def streamed(self) -> Streamed:
        """Once the device has finished."""
        took = [arrival.took() for arrival in self._arrivals]
        return Streamed(self._records, sum(t.copying_ns for t in took), sum(t.waiting_ns for t in took))


class PromptExperts:
    """One engine thread uses it, through `GpuExperts`."""

    def __init__(self, cache: ExpertCache, info: ExpertsInfo, device: torch.device) -> None:
        self._cache, self._info, self._layout, self._device = cache, info, info.layout, device
        self._lent = contextlib.ExitStack()
        self._feed: Feed | None = None
        self._borrowed: Borrowed | None = None
        self._open = False
        # Each is written anew only after the device has passed what read or wrote it last: whoever has waited for a
        # layer's routing knows that of the layer before. Of steps that had begun two tables, by turns: they are told
        # before that wait.
        self._begins = places.host_words(info.experts + 1, device, torch.int32)
        self._tables = [places.host_words(info.experts, device, torch.int64) for _ in range(3)]
        self._turn = 0
        self._expected: tuple[torch.Tensor, Asked] | None = None
        self._prelude = Prelude(device)

    def begin_window(self, means: Means) -> None:
        """Borrows slots, once a window: experts lose theirs. Ahead: every decoder layer will be asked for in turn."""
        if self._open:
            return
        self._open, self._prelude = True, Prelude(self._device)
        wanted = min(means.slots, self._cache.room // RING_SHARE)
        slots = sorted(self._lent.enter_context(self._cache.lend(wanted)))
        if slots:
            self._borrowed = Borrowed(self._cache, slots, self._prelude)
            layers = self._info.layers - self._info.draft_layers if means.ahead else 0
            self._feed = Feed(len(slots), self._cache.resident, self._borrowed, layers)

    def end_window(self) -> Borrowed | None:
        """Gives back what was borrowed, and what can be asked about it once the device has finished."""
        self._expected = None
        if not self._open:
            return None
        self._lent.close()
        borrowed, self._feed, self._borrowed, self._open = self._borrowed, None, None, False
        return borrowed

    def expect(self, ids: torch.Tensor) -> None:
        """The next layer's rows will be asked of experts ids int [R, K]: what is enqueued from here on until `forward`
        runs while the host plans."""
        self._expected = ids, grouped.ask(ids, self._info.experts, self._begins)
        self._prelude.told()

    def forward(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> npt.NDArray[np.int64]:
        """out fp32 [R, H] = the weighted sum of x fp32 [R, H] through experts ids [R, K]; all contiguous. How many rows
        every expert has, [E]."""
        expected, self._expected = self._expected, None
        if expected is None or expected[0] is not ids:
            expected = ids, grouped.ask(ids, self._info.experts, self._begins)
        count, feed = self._info.experts, self._feed
        rows = QuantisedRows.room(len(x), self._layout.hidden, self._layout.format.group, self._device)
        experts.quantise_rows(x, rows, self._layout.format.group)
        out.zero_()
        room = min(limits.PROMPT_PLACES, ids.numel())
        scratch = grouped.Scratch.of(self._layout, room, count, self._device)
        self._turn = 1 - self._turn
        begun = [] if feed is None else feed.begun(layer)
        addresses = self._told(self._tables[self._turn], layer, begun) if begun else torch.empty(0)
        self._cache.think()  # of the window before, if that is still to be done
        groups = expected[1].groups()  # waits for the routing
        of_expert = np.diff(groups.offsets)
        if of_expert.max() > room:
            room = int(of_expert.max())
            scratch = grouped.Scratch.of(self._layout, room, count, self._device)

        def run(steps: Sequence[Step], addresses: torch.Tensor) -> None:
            for step in steps:
                if feed is not None:
                    feed.arrive(step)
                for work in places.batches(groups, step.first, step.end, room):
                    grouped.run(self._layout, addresses, groups, work, rows, weights, scratch, out)
                if feed is not None:
                    feed.over(step)

        run(begun[:1], addresses)  # the device has something to do while the others are planned
        rest = [Step(0, 0, count, (), 0)] if feed is None else feed.rest(np.flatnonzero(of_expert).tolist())
        run(begun[1:], addresses)
        if rest:
            run(rest, self._told(self._tables[-1], layer, rest))
        self._prelude.over()
        return of_expert

    def _told(self, table: torch.Tensor, layer: int, steps: Sequence[Step]) -> torch.Tensor:
        """Where a layer's experts lie, int64 [E] on the device: those of the steps in their slots."""
        words = table.numpy()
        words[:] = self._cache.addresses[layer]
        if self._borrowed is not None:
            for step in steps:
                for expert, slot in step.copies:
                    words[expert] = self._borrowed.address(slot)
        addresses = torch.empty(len(words), dtype=torch.int64, device=self._device)
        fetch(table, addresses)
        return addresses
