"""The engine: one thread, one active generation, and at most one that visits it while its prompt is read.

    submit ──▶ active ───step──▶ step──▶ …                ──▶ step ──▶ End
                  visitor: submit ──▶ step ──▶ … ──▶ End        (turns says whose step is next)

Not here: text, users, queues, wire, what a step is (steps). Between any two steps is a safe point: experts change
residency there, counters are published there, generations take turns there. A cancel is seen there too, and inside a
window between two layers; a generation that is put aside ends at the other one's next safe point.

Invariants: every submitted generation gets exactly one `End`, and its place is free before that `End` is handed over;
after a fatal error nothing runs on this engine again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from lanes import limits
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.drafts.times import Mean
from lanes.errors import Busy, Draining, EngineFailed, LaneError
from lanes.generation import Generation
from lanes.grammar import Grammars
from lanes.outbox import End, Outbox
from lanes.request import Request
from lanes.runner import Runner
from lanes.steps import Outcome, Running, Steps
from lanes.turns import Turns
from lanes.watchdog import Step, StepTimes, StepWatch

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """What a lane is doing, as of the last safe point; `step` as of now. States: ready, busy, draining."""

    state: str
    request_ids: tuple[str, ...]  # of what was accepted and has not ended: the active one, then its visitor
    counters: Counters
    step: Step | None = None
    step_times: tuple[StepTimes, ...] = ()
    windows_ns: tuple[Mean, ...] = ()  # of decode windows, by rows - 1


@dataclass(slots=True)
class _Visit:
    """The generations that run now, the active one first."""

    running: dict[Generation, Running] = field(default_factory=dict)
    turns: Turns = field(default_factory=lambda: Turns(0))


class Engine:
    """Start once; `submit`, `cancel`, `drain` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        counters: Counters,
        *,
        prefill_chunk_rows: int,
        windows_up_to: int = 0,
        visitor_tokens: int = 0,
        steered: bool = False,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        on_fatal: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._runner = runner
        self._counters = counters
        self._watch = StepWatch()
        self._published = counters.snapshot()
        self.drafter = drafter or Drafter(0)
        self._steps = Steps(
            runner, counters, self._watch, prefill_chunk_rows=prefill_chunk_rows, windows_up_to=windows_up_to,
            steered=steered, drafter=self.drafter, grammars=grammars, publish=self._publish,
        )  # fmt: skip
        self._visitor_tokens = visitor_tokens
        self._clock = clock
        self._on_start = on_start
        self.on_change = on_change
        self.on_fatal = on_fatal
        self._changed = threading.Condition()
        self._accepted: list[Generation] = []  # from submit to just before its End: the active one, and its visitor
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
            if self._accepted and not self._may_visit(request):
                raise Busy("a generation is running")
            generation = Generation(request, outbox)
            self._accepted.append(generation)
            self._changed.notify_all()
        self.on_change()
        return generation

    def _may_visit(self, request: Request) -> bool:
        active = self._accepted[0]
        return (
            len(self._accepted) == 1
            and active.request.request_id == request.interrupts
            and active.reading
            and len(request.prompt_ids) + request.new_tokens <= self._visitor_tokens
        )

    def cancel(self, request_id: str) -> bool:
        """Stops the generation of that id within a step; False when there is none."""
        found = [one for one in tuple(self._accepted) if one.request.request_id == request_id]
        for generation in found:
            generation.cancel()
        return bool(found)

    def cancel_all(self) -> None:
        """Stops whatever runs within a step."""
        for generation in tuple(self._accepted):
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
            self.cancel_all()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> Status:
        """A consistent picture, cheap enough for every reader."""
        with self._changed:
            request_ids = tuple(one.request.request_id for one in self._accepted)
            state = "draining" if self._draining or self._stopping else "busy" if request_ids else "ready"
            windows_ns = self.drafter.beliefs.windows_ns
            return Status(state, request_ids, self._published, self._watch.step, self._watch.times, windows_ns)

    def _run(self) -> None:
        self._on_start()
        visit = _Visit()
        while True:
            try:
                if not (self._accepted or self._wait()):
                    return
                if len(self._accepted) > len(visit.running):
                    self._admit(visit)
                self._step(visit)
            except Exception as raised:  # also in what is done while nothing runs
                self._fail(_failure(raised), visit)
                return

    def _wait(self) -> bool:
        """Until there is a generation; False when the engine stops without one."""
        with self._changed:
            while not (self._accepted or self._stopping):
                self._changed.release()
                try:
                    more = self._runner.idle()
                    self._publish()
                finally:
                    self._changed.acquire()
                if not more and not (self._accepted or self._stopping):
                    self._changed.wait(limits.IDLE_S)
            return bool(self._accepted)

    def _admit(self, visit: _Visit) -> None:
        """What was accepted since the last step runs from now on."""
        with self._changed:
            accepted = tuple(self._accepted)
        for generation in accepted:
            if generation not in visit.running:
                self._runner.settle()  # what was counted is whose windows it were
                generation.before = self._counters.snapshot()
                visit.running[generation] = self._steps.of(generation)
                visit.turns = Turns(generation.request.alone_ms * 1_000_000)

    def _step(self, visit: _Visit) -> None:
        """One step of whose turn it is; ends what has ended."""
        running = tuple(visit.running)
        visitor = len(running) > 1 and visit.turns.visitors()
        generation = running[visitor]
        others = [other for other in running if other is not generation] if len(running) > 1 else ()
        before = self._counters.snapshot() if others else self._published
        began_ns = self._clock()
        self._steps.alone = not others
        self._counters.visits += visitor and generation.begun.slot < 0
        try:
            next(visit.running[generation])
        except StopIteration as over:
            del visit.running[generation]
            self._end(generation, over.value)
        else:
            visit.turns.took(self._clock() - began_ns, visitor=visitor)
        if others:
            self._runner.settle()
        if len(self._accepted) > 1:
            with self._changed:
                waiting = [one for one in self._accepted if one is not generation and one.begun.slot < 0]
            for one in waiting:
                one.waited_windows += 1
        for other in others:
            other.before = other.before.plus(self._counters.since(before))
            if other.cancelled():
                before = self._counters.snapshot()
                visit.running.pop(other).close()
                self._end(other, Outcome("cancelled"))
                generation.before = generation.before.plus(self._counters.since(before))

    def _fail(self, error: LaneError, visit: _Visit) -> None:
        """Nothing runs here again: whatever was accepted ends with the error."""
        with self._changed:
            self._stopping = True
            accepted = tuple(self._accepted)
        for generation in accepted:
            if (steps := visit.running.pop(generation, None)) is None:
                generation.before = self._counters.snapshot()
            else:
                with contextlib.suppress(Exception):  # the first failure is the one that is told
                    steps.close()
            self._end(generation, Outcome("error", error))
        self.on_fatal()

    def _end(self, generation: Generation, outcome: Outcome) -> None:
        request, error = generation.request, outcome.error
        prompt_tokens = len(request.prompt_ids) - request.replayed_tokens
        self._counters.cancelled += outcome.reason == "cancelled"
        self._counters.failed += outcome.reason == "error"
        with self._changed:
            self._published = self._counters.snapshot()
            self._accepted.remove(generation)
            (self._watch.between if self._accepted else self._watch.idle)()
        generation.outbox.finish(
            End(
                reason=outcome.reason,
                prompt_tokens=prompt_tokens,
                completion_tokens=request.replayed_tokens + generation.sent,
                cached_tokens=min(generation.begun.cached_tokens, prompt_tokens),
                restored_tokens=min(generation.begun.restored_tokens, prompt_tokens),
                waited_windows=generation.waited_windows,
                counters=self._published.since(generation.before),
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
