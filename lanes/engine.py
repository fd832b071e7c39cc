"""The engine: one thread, one active generation. Admit, prefill chunk or decode window, draw, emit.

Not here: text, users, queues, wire. It knows tokens and one `Runner`.
Between any two windows is a safe point: experts change residency there, counters are published there. A cancel is
seen there too, and inside a window between two layers.

Invariants: every submitted generation gets exactly one `End`, and the engine is free before that `End` is handed over;
after a fatal error nothing runs on this engine again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from lanes import limits
from lanes.answer import Answer
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter, Drafting
from lanes.drafts.policy import Mean
from lanes.errors import BadGrammar, Busy, Draining, EngineFailed, LaneError, NonFiniteLogits, SlowReader
from lanes.grammar import Grammar, Grammars
from lanes.outbox import End, Outbox
from lanes.request import Request
from lanes.runner import Logits, Runner
from lanes.state.conversations import Begun
from lanes.state.reuse import marks, parts
from lanes.watchdog import Step, StepTimes, StepWatch
from lanes.window import Window

_log = structlog.get_logger(__name__)

_NOWHERE = Begun(-1)


@dataclass(slots=True, eq=False)
class Generation:
    """One running request; `cancel` may be called from any thread."""

    request: Request
    outbox: Outbox
    begun: Begun = _NOWHERE  # where in the prompt it began
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Asks for its end at the next safe point."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Whether its end was asked for."""
        return self._cancelled.is_set()


@dataclass(frozen=True, slots=True)
class Status:
    """What a lane is doing, as of the last safe point; `step` as of now. States: ready, busy, draining."""

    state: str
    active_request_id: str
    counters: Counters
    step: Step | None = None
    step_times: tuple[StepTimes, ...] = ()
    windows_ns: tuple[Mean, ...] = ()  # of decode windows, by rows - 1


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a window's rows gave: why the answer ended ("" while it goes on), drafts that were right, and compared."""

    reason: str
    right: int = 0
    checked: int = 0
    error: LaneError | None = None


class Engine:
    """Start once; `submit`, `cancel`, `drain` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        counters: Counters,
        *,
        prefill_chunk_rows: int,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._counters = counters
        self._watch = StepWatch()
        self._published = counters.snapshot()
        self._chunk = prefill_chunk_rows
        self._drafter = drafter or Drafter(0)
        self._grammars = grammars
        self._on_start = on_start
        self.on_change = on_change
        self.on_fatal = on_fatal
        self._changed = threading.Condition()
        self._active: Generation | None = None  # from submit to just before its End
        self._waiting = False  # submitted, not yet taken by the thread
        self._draining = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, request: Request, outbox: Outbox) -> Generation:
        """Admits a request; raises Busy or Draining."""
        with self._changed:
            if self._draining or self._stopping:
                raise Draining("the lane takes no new generation")
            if self._active is not None:
                raise Busy("a generation is running")
            generation = self._active = Generation(request, outbox)
            self._waiting = True
            self._changed.notify_all()
        self.on_change()
        return generation

    def cancel(self, request_id: str) -> bool:
        """Stops the running generation of that id within a step; False when there is none."""
        generation = self._active
        if generation is None or generation.request.request_id != request_id:
            return False
        generation.cancel()
        return True

    def cancel_active(self) -> None:
        """Stops whatever runs within a step."""
        generation = self._active
        if generation is not None:
            generation.cancel()

    def drain(self) -> None:
        """Nothing new from now on; what runs goes on."""
        with self._changed:
            self._draining = True
        self.on_change()

    def stop(self) -> None:
        """Cancels what runs and joins the thread."""
        with self._changed:
            self._stopping = True
            if self._active is not None:
                self._active.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> Status:
        """A consistent picture, cheap enough for every reader."""
        with self._changed:
            active = self._active
            state = "draining" if self._draining or self._stopping else "ready" if active is None else "busy"
            request_id = active.request.request_id if active else ""
            windows_ns = self._drafter.beliefs.windows_ns
            return Status(state, request_id, self._published, self._watch.step, self._watch.times, windows_ns)

    def _run(self) -> None:
        self._on_start()
        while (generation := self._next_or_fail()) is not None:
            before = self._counters.snapshot()
            fatal = False
            try:
                reason, sent, error = self._generate(generation)
            except Exception as raised:
                fatal = True
                reason, sent = "error", self._counters.generated_tokens - before.generated_tokens
                error = _failure(raised)
            self._end(generation, reason, sent, error, before, fatal)
            if fatal:
                self.on_fatal()
                return

    def _next_or_fail(self) -> Generation | None:
        try:
            return self._next()
        except Exception as raised:  # in what is done while nothing runs
            error = _failure(raised)
            with self._changed:
                self._stopping = True
                generation = self._active
            if generation is not None:  # submitted meanwhile
                self._end(generation, "error", 0, error, self._counters.snapshot(), True)
            self.on_fatal()
            return None

    def _next(self) -> Generation | None:
        with self._changed:
            while not (self._waiting or self._stopping):
                self._changed.release()
                try:
                    more = self._runner.idle()
                    self._publish()
                finally:
                    self._changed.acquire()
                if not more and not (self._waiting or self._stopping):
                    self._changed.wait(limits.IDLE_S)
            if not self._waiting:
                return None
            self._waiting = False
            return self._active

    def _generate(self, generation: Generation) -> tuple[str, int, LaneError | None]:
        """Returns (reason, tokens sent, error); raises what ends the process."""
        self._watch.between()
        self._counters.requests += 1
        request = generation.request
        try:
            grammar = self._grammar(request)
        except BadGrammar as error:
            return "error", 0, error
        # The last token of an answer is never read back.
        tokens = len(request.prompt_ids) + request.new_tokens - 1
        generation.begun = self._runner.resume(request.prompt_ids, tokens, request.tenant_salt)
        slot = generation.begun.slot
        try:
            logits = self._prefill(generation, slot)
            if logits is None:
                return "cancelled", 0, None
            return self._decode(generation, slot, logits, grammar)
        finally:
            self._runner.end(slot)

    def _prefill(self, generation: Generation, slot: int) -> Logits | None:
        """The logits after the prompt, or None when cancelled."""
        request, ids = generation.request, generation.request.prompt_ids
        logits = None
        kept = marks(
            len(ids), request.checkpoint_positions, limits.CHECKPOINT_EVERY_TOKENS, limits.CHECKPOINT_GAP_TOKENS
        )
        todo = parts(generation.begun.cached_tokens, len(ids), self._chunk, kept)
        self._runner.hint(ids, todo[0].start, todo[0].end)
        for part, following in itertools.zip_longest(todo, todo[1:]):
            start, end = part.start, part.end
            if generation.cancelled():
                return None
            if following is not None:  # what the next chunk needs from disk arrives while this one computes
                self._runner.hint(ids, following.start, following.end)
            window = Window.of_sequence(list(ids[start:end]), start, slot, logits="last" if end == len(ids) else "none")
            began_ns = time.monotonic_ns()
            logits = self._step("prefill", window, generation)
            if logits is None:
                return None
            self._counters.prefill_ns += time.monotonic_ns() - began_ns
            self._counters.prompt_tokens += end - start
            if part.mark:
                self._runner.checkpoint(slot)
            self._publish()
        return logits

    def _grammar(self, request: Request) -> Grammar | None:
        if not request.grammar:
            return None
        if self._grammars is None:
            raise BadGrammar("this lane has no grammars")
        return self._grammars.begin(request.grammar, request.replayed_ids, sorted(request.stop_ids))

    def _decode(
        self, generation: Generation, slot: int, logits: Logits, grammar: Grammar | None
    ) -> tuple[str, int, LaneError | None]:
        answer = Answer(generation.request, logits.shape[1], grammar)
        drafting = self._drafter.begin(generation.request)
        emitted = self._emit(generation, answer, drafting, logits, ())
        while not emitted.reason:
            emitted = self._round(generation, slot, answer, drafting)
        return emitted.reason, answer.sent, emitted.error

    def _round(self, generation: Generation, slot: int, answer: Answer, drafting: Drafting) -> Emitted:
        """One decode window: the last token and drafts go in, the state moves by the rows that were right."""
        clock = self._drafter.clock  # what drafts cost and bring is told by one clock
        began_ns = clock()
        place = answer.position - 1  # of the last token, which is not in the state yet
        proposal = drafting.propose(slot, answer.last, place, answer.left - 1)  # at least one token is no draft
        rows, trial = [answer.last, *proposal.ids], bool(proposal.ids)
        asked_ns = clock()
        logits = self._step("decode", Window.of_sequence(rows, place, slot, logits="all", trial=trial), generation)
        if logits is None:
            return Emitted("cancelled")
        window_ns = clock() - asked_ns
        emitted = self._emit(generation, answer, drafting, logits, proposal.ids)  # may wait for the reader
        if trial:
            settling_ns = clock()
            self._runner.commit(slot, 1 + emitted.right)
            self._runner.end_window()
            window_ns += clock() - settling_ns
        drafting.learn(proposal, emitted.right, emitted.checked, window_ns)
        self._counters.drafts(len(proposal.ids), emitted.right)
        self._counters.decode_ns += asked_ns - began_ns + window_ns
        return emitted

    def _emit(
        self, generation: Generation, answer: Answer, drafting: Drafting, logits: Logits, drafts: Sequence[int]
    ) -> Emitted:
        """Draws and sends a token from each row, for as long as the row after it was computed for that token."""
        for right, (row, draft) in enumerate(zip(logits, (*drafts, None), strict=True)):
            if generation.cancelled():
                return Emitted("cancelled", right, right)
            try:
                token = answer.draw(row)
            except BadGrammar as error:
                return Emitted("error", right, right, error)
            if not generation.outbox.put(token, generation.cancelled, limits.SLOW_READER_S):
                return Emitted("error", right, right, SlowReader("the client stopped reading"))
            answer.sent += 1
            drafting.add(token.id)
            self._counters.generated_tokens += 1
            self._publish()
            if reason := answer.end():
                return Emitted(reason, right, right)
            if token.id != draft:
                return Emitted("", right, right + (draft is not None))
        raise AssertionError("the last row has no draft")

    def _step(self, kind: str, window: Window, generation: Generation) -> Logits | None:
        """One window and, but for a trial, the safe point after it; None when a cancel left it half way."""

        def stopped() -> bool:  # asked before every layer
            self._watch.progress()
            return generation.cancelled()

        self._watch.begin(kind)
        logits = self._runner.forward(window, stopped)
        if logits is None or not window.trial:
            self._runner.end_window()
        if logits is None:
            return None
        self._watch.done()
        self._counters.windows += 1
        if not np.isfinite(logits).all():
            raise NonFiniteLogits("the model's logits are not finite")
        return logits

    def _end(
        self, generation: Generation, reason: str, sent: int, error: LaneError | None, before: Counters, fatal: bool
    ) -> None:
        request = generation.request
        prompt_tokens = len(request.prompt_ids) - request.replayed_tokens
        self._counters.cancelled += reason == "cancelled"
        self._counters.failed += reason == "error"
        self._watch.idle()
        with self._changed:
            self._published = self._counters.snapshot()
            self._active = None
            self._stopping |= fatal
        generation.outbox.finish(
            End(
                reason=reason,
                prompt_tokens=prompt_tokens,
                completion_tokens=request.replayed_tokens + sent,
                cached_tokens=min(generation.begun.cached_tokens, prompt_tokens),
                restored_tokens=min(generation.begun.restored_tokens, prompt_tokens),
                counters=self._published.since(before),
                error_code=error.code if error else "",
                error_message=str(error) if error else "",
            )
        )
        self.on_change()

    def _publish(self) -> None:
        self._published = self._counters.snapshot()


def _failure(raised: Exception) -> LaneError:
    """What the client and the log are told: the type and place of a bug, never its message, which may hold tokens."""
    error = raised if isinstance(raised, LaneError) else EngineFailed("the engine failed")
    _log.error("engine_failed", code=error.code, kind=type(raised).__name__, where=_where(raised))
    return error


def _where(error: BaseException) -> str:
    """File name and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
