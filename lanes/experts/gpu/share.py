"""The CPU's share of a GPU lane's misses, ready for launches: the block, the thread, the table of counts, the doorbell.

Between windows the done word lets every wait pass, so launches that warm kernels up or are captured never hang; what
they compute is then void. Inside a window (`begin` .. `end`) the thread answers, and an error of either side releases
the window and stays. Not here: which way of ringing works (probe), how many misses
the CPU should take (cpu_line, link_cost, climb).

Invariant: the device's table of counts changes between windows only; what changes it while a window runs stands behind
that in the stream.

Letters: L layers, E experts, R rows of a window, K experts per row, P = R * K pairs, H hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.errors import HandshakeLost
from lanes.experts import cpu_line, link_cost
from lanes.experts.climb import Climb, after
from lanes.experts.cpu_line import Line, Seen
from lanes.experts.gpu.doorbell import Doorbell, KernelWords
from lanes.experts.gpu.rates import Rates
from lanes.experts.link_cost import Known
from lanes.experts.native import ExpertKernel
from lanes.experts.share import RELEASED, CpuShare, Tables, block_of
from lanes.experts.split import I32, cpu_share_table
from lanes.kernels.fetch import fetch
from lanes.kernels.post import Inputs

_ALIGNMENT_BYTES = 64
_LOOK = 8  # windows between two looks at what the CPU took
_TELL, _TELL_LOOKS = 0.1, 64  # the part by which the CPU's time must have changed to be told, and how often it is
_SETTLE_S = 5.0  # from the last answer to the thread's own word that it is idle


class Lapse(NamedTuple):
    """What a window took, as copies: whoever learns from it does so while the next one runs."""

    window_ns: int
    layers_ns: npt.NDArray[np.int64]  # [L, 2] when each one's doorbell was seen and answered
    spent: npt.NDArray[np.int64]  # [P + 1, 2] by the thread, until then


@dataclass(frozen=True, slots=True)
class Found:
    """What the search has found."""

    bias: float
    line: Line  # of the CPU
    link_us: float  # of an expert
    counts: I32


class Share:
    """One per lane; the engine thread uses it. Close it before `kernel` and the region."""

    def __init__(
        self,
        kernel: ExpertKernel,
        addresses: npt.NDArray[np.uint64],
        chosen: int,
        device: torch.device,
        *,
        core: int | None = None,
        silence_s: float = limits.HANDSHAKE_S,
    ) -> None:
        """`kernel` is nobody else's while a window is open; addresses [L, E] are those of the region's records in this
        process. `core` is the thread's. Starts with no misses for the CPU."""
        rows, pairs, hidden = limits.MAX_WINDOW_TOKENS, limits.MAX_WINDOW_TOKENS * chosen, kernel.layout.hidden
        block = block_of(kernel, rows, chosen)
        # The words must lie on a cache line of their own, and the device must see them where they lie.
        memory = torch.zeros(block.bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory = memory[-memory.data_ptr() % _ALIGNMENT_BYTES :][: block.bytes]

        def part(offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
            return memory[offset : offset + count * dtype.itemsize].view(dtype)

        self._rung, self._done = part(block.doorbell, 1, torch.int64), part(block.done, 1, torch.int64)
        self._done_word = self._done.numpy()
        self.inputs = Inputs(
            part(block.layer, 2, torch.int32),  # rows is the next word
            part(block.ids, pairs, torch.int32),
            part(block.x, rows * hidden, torch.float32),
        )
        self.y = part(block.y, pairs * hidden, torch.float32).view(pairs, hidden)
        self._table = torch.zeros(pairs + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._counts = self._table.numpy()
        self.cpu_of_misses = torch.zeros(pairs + 1, dtype=torch.int32, device=device)  # the device's
        self._spent = np.zeros((pairs + 1, 2), np.int64)  # the thread's, as
        self._times = np.zeros((len(addresses), 2), np.int64)  # of the last window
        self._kernel = kernel
        tables = Tables(addresses, self._spent, self._times)
        self._thread = CpuShare(kernel, tables, memory.numpy(), rows, chosen, core=core, silence_s=silence_s)
        self._rest()
        self.doorbell: Doorbell = KernelWords(self._rung, self._done)
        # Is told what the search has found.
        self.on_split: Callable[[Found], None] = lambda found: None
        self._link: Known | None = None  # nothing is searched without
        self._climb, self._seen, self._told = Climb(), Seen.of(Line(0.0, 0.0), pairs), Line(0.0, 0.0)
        self._told_us, self._learnt = 0.0, 0  # of the link; windows
        self._looked, self._windows = self._spent.copy(), 0  # what was spent at the last look; windows since
        self._quiet_looks = 0  # until it may be told again
        self._began_ns = self._layers = 0

    @property
    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(doorbell, done), int64 [1] each, in host memory."""
        return self._rung, self._done

    @property
    def most(self) -> I32:
        """The table by which the CPU takes every miss."""
        return np.arange(len(self._counts), dtype=np.int32)

    @property
    def counts(self) -> I32:
        """Of so many misses of a layer the CPU takes so many: int32 [P + 1], a copy."""
        return self._counts.copy()

    def split(self, counts: I32) -> None:
        """From the next window on, for good; between windows only."""
        assert ((counts >= 0) & (counts <= np.arange(len(counts)))).all(), "the CPU takes what misses, at most"
        self._link = None
        self._set(counts)

    def search(self, rates: Rates, copy_us: float = math.inf) -> None:
        """Splits by these rates at first, and from then on by what windows say: lanes.experts.cpu_line, link_cost and
        climb. `copy_us`: what a copy of an expert took the link."""
        self._link, self._climb = Known.of(rates.link_us, min(rates.link_alone_us, copy_us)), Climb()
        self._told, self._told_us = Line(rates.cpu_start_us, rates.cpu_us), rates.link_us
        # Whatever the start measured, the CPU is believed to be worth a try where a layer misses a few.
        least_us = min(cpu_line.LEAST_SHARE * rates.cpu_alone_us, rates.link_us)
        self._seen = Seen.of(self._told, len(self._counts) - 1, least_us)
        np.copyto(self._looked, self._spent)
        self._windows = self._quiet_looks = self._learnt = 0
        self._set(self._wanted(self._link))

    def learn(self, rows: int, lapse: Lapse, sides: npt.NDArray[np.int64]) -> None:
        """Of a window of `rows` rows that has ended, at any time before the next one does: what `end` gave, and how
        many of its layers' experts were the CPU's and how many the link's, [L, 2].

        A split that this changes is that of the next window to begin: what runs meanwhile has all its launches.
        """
        if self._link is None:
            return
        times = lapse.layers_ns
        if len(times) > 1:
            layer_us, cpu_us = np.diff(times[:, 0]) / 1e3, (times[:, 1] - times[:, 0]) / 1e3 * (sides[:, 0] > 0)
            self._link = link_cost.after(self._link, rows, layer_us, cpu_us[:-1], sides[:-1, 1])
            self._learnt += 1
            if self._learnt % _LOOK == 0:
                self._link = link_cost.judged(self._link, _LOOK)
        self._search_on(rows, lapse, self._link)

    def _wanted(self, link: Known) -> I32:
        line = self._seen.line.times(2.0**self._climb.used)
        return cpu_share_table(len(self._counts) - 1, link.link_us, line.each_us, line.start_us)

    def _search_on(self, rows: int, lapse: Lapse, link: Known) -> None:
        before, self._climb = self._climb, after(self._climb, rows, lapse.window_ns)
        self._windows += 1
        if looks := self._windows == _LOOK:
            layers, ns = (lapse.spent - self._looked).T
            self._seen = cpu_line.after(self._seen, _LOOK, layers, ns)
            np.copyto(self._looked, lapse.spent)
            self._windows, self._quiet_looks = 0, max(0, self._quiet_looks - 1)
        if looks or self._climb.used != before.used:
            counts = self._wanted(link)
            if not np.array_equal(counts, self._counts):
                self._set(counts)
        apart = max(self._seen.line.apart(self._told), abs(link.link_us / self._told_us - 1))
        moved = looks and not self._quiet_looks and apart > _TELL
        if moved or self._climb.bias != before.bias:
            self._told, self._told_us, self._quiet_looks = self._seen.line, link.link_us, _TELL_LOOKS
            self.on_split(Found(self._climb.bias, self._told, link.link_us, self.counts))

    def _set(self, counts: I32) -> None:
        self._counts[:] = counts
        fetch(self._table, self.cpu_of_misses)

    def begin(self, layers: int) -> None:
        """A window of so many layers begins; raises HandshakeLost after an error."""
        self._thread.arm(layers)
        self._layers = layers
        self._began_ns = time.monotonic_ns()

    def end(self) -> Lapse:
        """The window's launches have finished.

        Raises HandshakeLost where the two sides lost each other.
        """
        window_ns = time.monotonic_ns() - self._began_ns
        if self._thread.check():
            self._settle()
        self._rest()
        return Lapse(window_ns, self._times[: self._layers].copy(), self._spent.copy())

    def _settle(self) -> None:
        """Until the thread says that it is idle."""
        until_s = time.monotonic() + _SETTLE_S
        while self._thread.check():
            if time.monotonic() > until_s:
                raise HandshakeLost("the window ended before the CPU's share of it")

    def erase(self) -> None:
        """Zeroes what windows have left in the block and in the kernel's scratch; between windows only."""
        for tensor in (self.inputs.head, self.inputs.ids, self.inputs.x, self.y):
            tensor.zero_()
        self._kernel.erase()

    def close(self) -> None:
        """Ends the thread; a window in flight is released. Safe to call twice."""
        self._thread.close()

    def _rest(self) -> None:
        self._done_word[0] = RELEASED
