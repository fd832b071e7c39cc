"""The routed experts of every layer on a GPU: what a window launches, what is counted after it, when the cache turns.

    attach(share)                            host, once: the CPU takes its share of decoder layers' misses from here on
    begin_window(rows)                       host, before the window's launches or its graph's replay
    begin_prompt(rows)                       host, before a window of many rows: its experts may begin to come; of very
                                             many it has the spare slots' memory until the next decode window
    launch(layer, x, ids, weights, out)      enqueues kernels; nothing is allocated, waited for or read back
    launch_routed(layer, x, scores, ...)     the same from a router's scores, without the sum over a row's experts
    (the stream has finished)
    keep(rows)                               host; of a trial window: its first rows were right
    end_window()                             host: what arrived and what was planned comes into the table, if `think`
                                             has left it
    think()                                  host, while the next window runs: counters, the cache's plan, its copies,
                                             and the table of the window after that one
    settle()                                 host, between windows: what waits for `think`, and its plan, at once

Everything that a captured graph reads through (tables, workspace, log) exists from the start and stays where it is.
The launch of layer 0 fetches the cache's table; what runs eagerly fetches it when it is another one than before.
On device "cpu" the same kernels run in Triton's interpreter and addresses are those of this process.
Not here: kernels (lanes.kernels), slots and policy (cache), when windows run (the lane).

Invariant: results are those of `lanes.experts.store.ExpertStore` to the bit, whatever is resident. The tables that a
window reads change between windows only, and the device's alone say what is whose.

Letters: L layers with draft layers, E experts, R rows of a window, K experts per row, P = R * K pairs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.counters import Counters
from lanes.experts.cache import ExpertCache, split_table
from lanes.experts.gpu.ended import Ended
from lanes.experts.gpu.prompt import Means, PromptExperts
from lanes.experts.gpu.share import Share
from lanes.experts.gpu.workspace import Pairs, Workspace
from lanes.experts.policy import Touched
from lanes.experts.store import Interrupted
from lanes.kernels import combine, experts, jobs, post, route
from lanes.kernels.ahead import Ahead
from lanes.kernels.fetch import fetch
from shared_experts.manifest import ExpertsInfo


class GpuExperts:
    """Implements `lanes.experts.protocol.Experts`, and launches that a graph can hold; one engine thread uses it."""

    def __init__(
        self, cache: ExpertCache, info: ExpertsInfo, chosen: int, counters: Counters, device: torch.device | str
    ) -> None:
        """`cache` holds addresses as the device sees them; `chosen` is K."""
        self._cache, self._counters = cache, counters
        self.info, self.chosen, self.device = info, chosen, torch.device(device)
        self._layout = info.layout
        self.stopped: Callable[[], bool] = lambda: False
        self.share: Share | None = None
        self.decoder_layers = info.layers - info.draft_layers
        self._open = self._shared = False  # between begin_window and end_window; with the CPU's share
        # A version of the table, and a copy of what was resident by it.
        self._copied: tuple[int, npt.NDArray[np.bool_]] = (-1, cache.resident)
        self._resident_then: npt.NDArray[np.bool_] | None = None  # when the window began, if the table has moved on
        self.recorder: Callable[[Touched], None] | None = None  # is told of every finished window
        # Is told of a finished pass: its rows, and how long a layer's took before their experts could begin.
        self.paced: Callable[[int, float], None] = lambda rows, seconds: None
        # By the rows of a pass; until something was measured its experts always come ahead.
        self.feeding: Callable[[int], Means] = lambda rows: Means(ahead=True, slots=limits.RING_SLOTS)
        shape = (info.layers, info.experts)
        self._said = torch.from_numpy(cache.table.view(np.int64))
        self._table = torch.empty(self._said.shape, dtype=torch.int64, device=self.device)
        self._addresses: torch.Tensor
        self._resident: torch.Tensor
        self._addresses, self._resident = split_table(self._table, *shape, torch.int8)
        self._version = -1
        self._publish()
        self._work = [
            Workspace.of(self._layout, rows, chosen, self.device) for rows in range(1, limits.MAX_WINDOW_TOKENS + 1)
        ]
        # A draft layer, the last one, runs up to MAX_DRAFTS times in a window: an entry each. Should it run more often,
        # the rest is counted nowhere.
        entries = info.layers + limits.MAX_DRAFTS - 1
        layer_of = np.minimum(np.arange(entries), info.layers - 1)
        self._first_key = (layer_of * info.experts)[:, None, None]
        # What was chosen, written by the device; the last entry is nobody's.
        self._log = torch.full(
            (entries + 1, limits.MAX_WINDOW_TOKENS, chosen), -1, dtype=torch.int32,
            pin_memory=self.device.type == "cuda",
        )  # fmt: skip
        self._seen = self._log.numpy()
        self._none = torch.zeros(limits.MAX_WINDOW_TOKENS * chosen + 1, dtype=torch.int32, device=self.device)
        self._wide = np.zeros(shape, np.int64)  # uses in windows too long for the log
        self._is_wide = False
        self._prompt = PromptExperts(cache, info, self.device)
        self._calls = [0] * info.layers  # of `forward` in this window
        self._rows = self._kept = 0

    def attach(self, share: Share | None) -> None:
        """From here on `launch` of a decoder layer gives the CPU its share; windows captured before do without."""
        self.share = share

    def begin_window(self, rows: int) -> None:
        """A decode window of so many rows, 1 to MAX_WINDOW_TOKENS, through every decoder layer in order, begins.

        Raises HandshakeLost when the CPU's share has ended.
        """
        self._rows = self._kept = rows
        self._open = True
        self._cache.take()
        self._version = self._cache.version  # the first layer's launch fetches it
        if self.share is not None:
            self.share.begin(self.decoder_layers)
            self._shared = True

    def begin_guess(self) -> None:
        """A draft layer's pass, of one row through its experts, begins between two windows.

        Raises Interrupted when stopped.
        """
        if self.stopped():
            raise Interrupted
        if not self._open:
            self._rows = self._kept = 1
        self._publish()

    def begin_prompt(self, rows: int) -> None:
        """A window of so many rows through every decoder layer in order begins, by `forward`."""
        if rows <= limits.MAX_WINDOW_TOKENS:
            return
        if rows > limits.PROMPT_ROWS_IN_PLACE:
            self._cache.give()
        means = self.feeding(rows)
        self._counters.ahead_tokens += rows * means.ahead
        self._prompt.begin_window(means)
        self._publish()

    def launch(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, turn: int = 0
    ) -> None:
        """out fp32 [R, H] = the weighted sum of x fp32 [R, H] through experts ids int32 [R, K] by weights fp32 [R, K].

        ids are distinct and ascending in a row. All contiguous, on the device. `turn` counts the calls of a draft layer
        in one window.
        """
        if layer == 0:
            fetch(self._said, self._table)
        shared = self.share if layer < self.decoder_layers else None
        self._run(layer, x, ids, weights, out, self._entry(layer, turn), shared)

    def launch_routed(
        self, layer: int, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        *, normalise: bool, turn: int = 0, ahead: torch.Tensor | None = None,
    ) -> Pairs:  # fmt: skip
        """`launch` from a router's scores fp32 [R, at least E], and without the sum, for a launch that adds more than
        that (lanes.kernels.shared). Fills ids and weights. `ahead`: of one row, what is sent for while experts miss."""
        if layer == 0:
            fetch(self._said, self._table)
        share, work = self.share if layer < self.decoder_layers else None, self._work[len(x) - 1]
        counts = self._none if share is None else share.cpu_of_misses
        routed = route.Routed(ids, weights, work.jobs, work.slots)
        log, inputs = self._entry(layer, turn), None if share is None else share.inputs
        posted = post.Post(x, work.x, self._layout.format.group, log, layer, inputs)
        resident = self._resident[layer]
        route.route(scores, resident, counts, routed, normalise=normalise, posted=posted)
        return self._pairs(layer, len(x), share, None if ahead is None else Ahead(ahead, resident))

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        """The next call of `forward` is for this layer and these ids: of many rows, sorting them begins."""
        if len(ids) > limits.MAX_WINDOW_TOKENS:
            self._prompt.expect(ids)

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of a window of any size, as `lanes.experts.protocol.Experts` says; many rows are grouped by expert.

        It is computed without the CPU's share.
        """
        if self.stopped():
            raise Interrupted
        rows, most = len(x), limits.MAX_WINDOW_TOKENS
        if not self._open:
            self._rows = self._kept = rows
        self._publish()
        x, weights = x.contiguous(), weights.contiguous()
        out = torch.empty_like(x)
        if rows <= most:
            self._run(layer, x, ids.to(torch.int32), weights, out, self._entry(layer, self._calls[layer]), None)
            self._calls[layer] += 1
            return out
        self._is_wide = True
        # Not begun as a prompt: a draft layer has many rows to catch up with.
        self._prompt.begin_window(Means(ahead=False, slots=limits.RING_SLOTS))
        self._publish()
        self._wide[layer] += self._prompt.forward(layer, x, ids, weights, out)
        return out

    def resident(self, layer: int) -> torch.Tensor:
        """Which experts are in VRAM, bool [E] on the device."""
        self._publish()
        return self._resident[layer].bool()

    def keep(self, rows: int) -> None:
        """Only the first rows of the window were right: what the others chose is no use to come back for."""
        self._kept = rows

    def erase(self) -> None:
        """Zeroes what buffers hold of earlier windows: the next one is another tenant's."""
        for work in self._work:
            work.erase()
        if self.share is not None:
            self.share.erase()

    def end_window(self) -> None:
        """The safe point, once the stream has finished: the cache's table is, from here on, the next window's.

        A decode window is counted, and thought about, when somebody lets it `think`; a prompt's too, or while the next
        one of its windows waits for its first routing.
        Raises HandshakeLost where the CPU's share was lost: what the window computed is void.
        """
        if (self._is_wide or not self._open) and self.device.type == "cuda":  # nobody has waited for the stream
            torch.cuda.current_stream(self.device).synchronize()
        borrowed = self._prompt.end_window()
        lapse = self.share.end() if self.share is not None and self._shared else None
        resident = self._residents() if self._resident_then is None else self._resident_then
        wide = self._wide.copy() if self._is_wide else None
        log = self._seen.copy()[:-1, : self._rows]
        ended = Ended(log, self._first_key, wide, resident, self._kept, borrowed, lapse)
        self._cache.pause(lambda: self._tell(ended))
        if not self._is_wide and not self._open:  # nothing runs beside what comes next
            self._cache.settle()
        self.discard_window()

    def think(self) -> None:
        """Counts the last window and lets the cache plan, while another one runs."""
        if self._open and self._resident_then is None:
            self._resident_then = self._residents()
        # Its first layer has told what it chose: the launch before that has fetched the table.
        self._cache.think(unread=self._open and int(self._seen[0, 0, 0]) >= 0)

    def settle(self) -> None:
        """Between windows: nothing of the last one waits for `think` any more."""
        self._cache.settle()

    def _tell(self, ended: Ended) -> Touched:
        ended.tell(self._counters, self._cache.record_bytes)
        if ended.borrowed is not None and (seconds := ended.borrowed.prelude.seconds()) is not None:
            self.paced(ended.kept, seconds)
        if self.share is not None and ended.lapse is not None:
            self.share.learn(ended.log.shape[1], ended.lapse, ended.sides(len(ended.lapse.layers_ns)))
        touched = ended.touched()
        if self.recorder is not None and touched.keys.shape[0]:
            self.recorder(touched)
        return touched

    def discard_window(self) -> None:
        """What ran since the last `end_window`, and has finished, is counted nowhere."""
        self._prompt.end_window()
        self._seen.fill(-1)
        if self._is_wide:
            self._wide.fill(0)
            self._is_wide = False
        self._calls = [0] * len(self._calls)
        self._open = self._shared = False
        self._resident_then = None

    def _residents(self) -> npt.NDArray[np.bool_]:
        """What is resident, [L, E]: a copy that nobody changes, the same one until the table is another."""
        if self._copied[0] != self._cache.version:
            self._copied = self._cache.version, self._cache.resident.copy()
        return self._copied[1]

    def _entry(self, layer: int, turn: int) -> torch.Tensor:
        """Where in the log the ids of a call go."""
        return self._log[min(layer + turn, len(self._log) - 1)]

    def _run(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
        log: torch.Tensor, share: Share | None,
    ) -> None:  # fmt: skip
        work, counts = self._work[len(x) - 1], self._none if share is None else share.cpu_of_misses
        jobs.jobs(ids, self._resident[layer], counts, work.jobs, work.slots)
        inputs = None if share is None else share.inputs
        post.post(x, ids, work.slots, work.x, self._layout.format.group, log, layer, inputs)
        pairs = self._pairs(layer, len(x), share)
        combine.combine(weights, pairs.y, pairs.y_cpu, pairs.slots, out)

    def _pairs(self, layer: int, rows: int, share: Share | None, ahead: Ahead | None = None) -> Pairs:
        """Of what was posted."""
        work, addresses = self._work[rows - 1], self._addresses[layer]
        y_cpu = work.y if share is None else share.y
        bell = answer = None
        if share is not None:  # before our own work: the CPU's runs beside it
            bell, answer = share.doorbell.ring(layer + 1), share.doorbell.answered(layer + 1)
        experts.gate_up(self._layout, addresses, work.jobs, work.x, work.h, bell, ahead)
        experts.quantise_rows(work.h, work.quantised, self._layout.format.group, opens=True)
        experts.down(self._layout, addresses, work.jobs, work.quantised, work.y, answer)
        if share is not None:
            share.doorbell.wait(layer + 1)
        return Pairs(work.y, y_cpu, work.slots)

    def _publish(self) -> None:
        """The device's table becomes the cache's, before anything that is enqueued from here on."""
        if self._version != self._cache.version:
            self._version = self._cache.version
            fetch(self._said, self._table)
