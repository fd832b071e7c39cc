"""`qwen4_exp` on a GPU: prompts through the eager blocks, decode windows through one list of launches at fixed places.

The sequence that runs has its state in the seat. A decode window of it leaves the state one window behind: how many of
the window's rows belong to the sequence is said to the next one (`accepted`), which brings them in first. So a commit
moves nothing but numbers. Whoever needs the state whole (a prompt's rows, a checkpoint, another sequence) settles it.

Not here: which window comes next. Invariants: `accepted` rows are owed to the occupant of the seat and nobody else; a
trial window that is never committed has not happened.

Letters: R rows, V vocabulary, S streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from lanes.experts.protocol import Experts
from lanes.experts.store import Interrupted
from lanes.models.errors import WindowError
from lanes.models.near import Near
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS
from lanes.models.qwen4_exp.gpu.graphs import Graphs
from lanes.models.qwen4_exp.gpu.guessing import Best, DraftExperts, Guessing
from lanes.models.qwen4_exp.gpu.prompt import Fetched, use_kernels
from lanes.models.qwen4_exp.gpu.saying import Ids, Saying
from lanes.models.qwen4_exp.gpu.window import DecodeWindow
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.models.qwen4_exp.rows import check
from lanes.state.commit import shift_ids
from lanes.state.host import PLAIN, Host
from lanes.state.seat import Seat
from lanes.state.sequence import SequenceState
from lanes.state.trial import Trial
from lanes.window import Meanwhile, Window, nothing


class WindowExperts(Experts, DraftExperts, Protocol):
    """Routed experts on the GPU: eager for prompts, launches for windows."""

    stopped: Callable[[], bool]

    def begin_window(self, rows: int) -> None:
        """A decode window of so many rows begins."""

    def begin_prompt(self, rows: int) -> None:
        """A window of so many rows through the eager blocks begins."""

    def think(self) -> None:
        """A window runs: time for what the last one has left to do."""

    def discard_window(self) -> None:
        """What ran since the last window, and has finished, is counted nowhere."""


class GpuQwen4Exp:
    """Implements `lanes.models.Model` over a loaded one whose weights are on the device."""

    def __init__(
        self, inner: Qwen4Exp, experts: WindowExperts, context_tokens: int, *, capture: bool = True, host: Host = PLAIN
    ) -> None:
        """`capture`: windows are captured as graphs, which takes a GPU; else their launches are made one by one.

        `host`: where states lie that are not in the seat.
        """
        self.spec, self.state_shape, self.device, self.dtype = inner.spec, inner.state_shape, inner.device, inner.dtype
        self.near: Near | None = None  # as the inner model's, which runs a prompt's windows
        self._inner, self._experts = inner, experts
        self.seat, self._host = Seat(inner.state_shape, context_tokens, inner.device, host), host
        on_gpu = inner.device.type == "cuda"
        self._window = DecodeWindow(inner, experts, self.seat)
        self._logits = torch.zeros(self._window.logits.shape, pin_memory=on_gpu)
        self._saying = Saying(self._window.said, inner)
        # What a window gives, by its rows: to cut it out when it is asked for would cost more than to draw from it.
        self._given = [(self._logits[:rows], self._window.best[:rows]) for rows in range(1, MOST_ROWS + 1)]
        self._streams = [self._window.streams(rows) for rows in range(1, MOST_ROWS + 1)]
        self._context: tuple[torch.Tensor, Ids] | None = None  # the seated sequence's, also as an array
        self._stream = torch.cuda.current_stream(inner.device) if on_gpu else None
        self._accepted = 0  # rows of the last window that the occupant's state still lacks
        self._fetched: Fetched | None = None  # a prompt's rows of host memory
        if on_gpu:
            self._fetched = use_kernels(inner, context_tokens)
        self._launches: DecodeWindow | Graphs = self._window
        if capture:
            self._launches = Graphs(self._window, inner.device, self._warm)
            self._window.erase()
        self._guessing: Guessing | None = None
        if inner.drafts is not None:
            warm = self._warm if capture else None
            self._guessing = Guessing(
                inner.drafts, inner.spec, experts, self.seat, self._window.streams(MOST_ROWS), warm
            )  # fmt: skip

    def forward(
        self, window: Window, states: Mapping[int, SequenceState], meanwhile: Meanwhile = nothing
    ) -> torch.Tensor:
        """Runs the rows, of one sequence: fp32 logits [rows that want them, V] in host memory; of a decode window that
        asks for the best, ids int64 [R].

        Those of a decode window are there until the next one.
        """
        runs = window.runs()
        if len(runs) != 1:
            raise WindowError("a lane on a GPU runs the rows of one sequence at a time")
        state = states[runs[0][0]]
        check(window, states, self.spec)
        if len(window.ids) <= MOST_ROWS and window.wants_all:
            self.take_seat(state)
            return self._decode(window, state, meanwhile)
        if self._guessing is not None:
            self._guessing.forget()
        self._experts.begin_prompt(window.token_ids.shape[0])  # experts are on their way while the state moves
        self.take_seat(state)
        self.settle(state)
        return self._inner.forward(window, states, meanwhile)

    def settle(self, state: SequenceState) -> None:
        """Whatever a window still owes this state is in it afterwards."""
        if self._accepted and self.seat.occupant is state:
            self._saying.accepted(self._accepted)
            self._launches.settle()
            self._wait()  # what was said may be overwritten from here on
        if self.seat.occupant is state:
            self._accepted = 0

    @torch.no_grad()
    def commit(self, state: SequenceState, rows: int) -> None:
        """The first `rows` rows of the state's trial window belong to the sequence, the others never were."""
        trial = state.trial
        if trial is None or trial.recurrent or self.seat.occupant is not state or not 1 <= rows <= trial.rows:
            return self._inner.commit(state, rows)  # of an eager window, or refused there
        self._advance(state, trial.token_ids.numpy()[:rows])
        state.trial = None

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Tokens start..end-1 of the sequence `ids` will soon be rows."""
        self._inner.hint(ids, start, end)

    def forget_hints(self) -> None:
        """Hinted tokens will not come."""
        self._inner.forget_hints()

    def erase(self) -> None:
        """Zeroes what is kept of the last window's rows; the state that lies in the seat stays."""
        if (occupant := self.seat.occupant) is not None:
            self.settle(occupant)
        self._context = None  # the sequence's own are its own to zero
        self._inner.erase()
        self._window.erase()
        self._saying.erase()
        if self._guessing is not None:
            self._guessing.erase()
        if self._fetched is not None:
            self._fetched.erase()
        self._host.erase()
        self._logits.zero_()

    def narrow_guesses(self, token_ids: Sequence[int]) -> None:
        """From now on `guess` answers with the logits of these tokens."""
        assert self._guessing is not None, "the model was loaded with its draft layer"
        self._inner.narrow_guesses(token_ids)
        self._guessing.narrow()

    @property
    def chains(self) -> bool:
        """Whether `guess` makes several at once."""
        return self._guessing is not None and self._guessing.chains

    def guess(
        self, state: SequenceState, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> torch.Tensor | Best:
        """The draft layer's logits fp32 [V], until the next guess, or the best of `best` guesses; the state is the one
        that runs."""
        assert self._guessing is not None, "the model was loaded with its draft layer"
        self.take_seat(state)
        found = self._guessing.guess(state, token, number, best, meanwhile)
        return found[0] if isinstance(found, torch.Tensor) else found

    @property
    def drafts(self) -> DraftLayer | None:
        """The layer that guesses, as it was loaded."""
        return self._inner.drafts

    @property
    def chained(self) -> torch.Tensor:
        """Streams fp32 [1, S * H] of the last guess, from which the next one goes on."""
        assert self._guessing is not None, "the model was loaded with its draft layer"
        return self._guessing.chained

    def take_seat(self, state: SequenceState) -> None:
        """The state is in the seat from now on; whoever was there is settled and lies in host memory."""
        if self.seat.occupant is not state:
            self._settle_occupant()
            self.seat.take(state)
        elif state.length == 0:  # begun again in its place
            self._accepted = 0

    def branch(self, state: SequenceState, root: SequenceState, tokens: int) -> None:
        """A state without rows is in the seat from now on, with another's first `tokens`."""
        self._settle_occupant()
        self.seat.branch(state, root, tokens)

    def _settle_occupant(self) -> None:
        if self._guessing is not None:
            self._guessing.forget()
        if (occupant := self.seat.occupant) is not None:
            self.settle(occupant)
        self._accepted = 0

    def _decode(self, window: Window, state: SequenceState, meanwhile: Meanwhile) -> torch.Tensor:
        ids, context = window.ids, self._context_of(state)
        rows = len(ids)
        if self._experts.stopped():
            raise Interrupted
        state.reserve(state.length + rows)
        state.trial = None
        self._saying.begin(ids, state.length, self._accepted)
        self._experts.begin_window(rows)
        self._launches.run_part(rows, 0)
        self._saying.ngrams(context, ids)  # while the part runs, which reads none of them
        for part in range(1, self._launches.parts):
            self._launches.run_part(rows, part)
        logits, best = self._given[rows - 1]
        if not window.best:
            logits.copy_(self._window.logits[:rows], non_blocking=True)
        meanwhile()
        if self._guessing is not None:
            self._guessing.expect(ids, state.length)
        self._experts.think()
        self._saying.count()
        self._wait()
        self._accepted = 0  # until somebody says which rows were right
        if window.trial:
            state.trial = Trial(window.token_ids, streams=self._streams[rows - 1])
        else:
            self._advance(state, ids)
        return best if window.best else logits

    def _advance(self, state: SequenceState, ids: Ids) -> None:
        """The window's first rows, these ids, belong to the sequence; they enter its matrices with the next window."""
        rows = len(ids)
        if self._guessing is not None:
            self._guessing.follow(state, ids)
        shift_ids(self._context_of(state), ids)
        state.length += rows
        self._accepted = rows

    def _context_of(self, state: SequenceState) -> Ids:
        if self._context is None or self._context[0] is not state.context_ids:
            self._context = state.context_ids, state.context_ids.numpy()
        return self._context[1]

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _warm(self, run: Callable[[], None]) -> None:
        """A window of nobody's, outside `begin_window`: no side waits for the other, what is computed is void."""
        run()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # that of the capture
        self._experts.discard_window()
