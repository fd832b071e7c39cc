"""The steps of one generation: prompt chunks, then decode windows with their drafts, each window one step.

    resume ──▶ chunk ─yield─▶ chunk ─yield─▶ … ──▶ draw ─yield─▶ window (send), draw ─yield─▶ … ──▶ send, end

What was drawn is sent beside the window that it starts or the guesses before that, or at once where another generation
waits for its turn; what the last drafts cost and brought is learnt then, too. At every `yield` the lane is at a safe
point: the generation's state is whole, and a window of another sequence may run.

Not here: threads, whose step is next, how an end is told (engine). Invariant: whoever closes the steps at a
`yield`, or takes them to their end, has left no state open.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lanes import limits
from lanes.answer import Answer
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter, Drafting
from lanes.errors import BadGrammar, LaneError, NonFiniteLogits, SlowReader
from lanes.generation import Generation
from lanes.grammar import Compiling, Grammar, Grammars
from lanes.request import Request
from lanes.runner import Logits, Runner
from lanes.sending import Sending
from lanes.state.reuse import Part, marks, parts
from lanes.watchdog import StepWatch
from lanes.window import Meanwhile, Window, nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why a generation ended: stop, length, cancelled, or error with what went wrong."""

    reason: str
    error: LaneError | None = None


class Emitted(NamedTuple):
    """What a window's rows gave: why the answer ended ("" while it goes on), drafts that were right, and compared."""

    reason: str
    right: int = 0
    checked: int = 0
    error: LaneError | None = None


Running = Generator[None, None, Outcome]


class Steps:
    """Makes the steps of generations; one engine's thread uses it."""

    def __init__(
        self,
        runner: Runner,
        counters: Counters,
        watch: StepWatch,
        *,
        prefill_chunk_rows: int,
        windows_up_to: int,
        steered: bool,
        drafter: Drafter,
        grammars: Grammars | None,
        publish: Callable[[], None],
    ) -> None:
        self._runner, self._counters, self._watch = runner, counters, watch
        self._chunk, self._steered, self._windows_up_to = prefill_chunk_rows, steered, windows_up_to
        self._drafter, self._grammars = drafter, grammars
        self._publish = publish
        self.alone = True  # the engine says so before a step: no other generation waits for its own

    def of(self, generation: Generation) -> Running:
        """To be run step by step to its end; raises what ends the process."""
        self._watch.between()
        self._counters.requests += 1
        request = generation.request
        try:
            compiling = self._compile(request)
        except BadGrammar as error:
            return Outcome("error", error)
        # The last token of an answer is never read back.
        tokens = len(request.prompt_ids) + request.new_tokens - 1
        generation.begun = self._runner.resume(request.prompt_ids, tokens, request.tenant_salt)
        slot = generation.begun.slot
        try:
            logits = yield from self._prefill(generation, slot)
            if logits is None:
                return Outcome("cancelled")
            generation.reading = False
            grammar = compiling.result(generation.cancelled) if compiling else None
            return (yield from self._decode(generation, slot, logits, grammar))
        except BadGrammar as error:  # before the first token
            return Outcome("error", error)
        finally:
            self._runner.end(slot)

    def _prefill(self, generation: Generation, slot: int) -> Generator[None, None, Logits | None]:
        """The logits after the prompt, or None when cancelled."""
        request, ids = generation.request, generation.request.prompt_ids
        logits = None
        # Where experts come over a link a pass costs a long chunk's time whatever its rows: few marks cut one in two.
        every = max(limits.CHECKPOINT_EVERY_TOKENS, self._chunk)
        gap = max(limits.CHECKPOINT_GAP_TOKENS, self._chunk // 2)
        kept = marks(len(ids), request.checkpoint_positions, every, gap)
        asked = len(ids) - request.replayed_tokens if self._steered else 0  # output is read as it was written
        todo = parts(generation.begun.cached_tokens, len(ids), self._chunk, [*kept, asked])
        self._runner.hint(ids, todo[0].start, todo[0].end)
        for part, following in itertools.zip_longest(todo, todo[1:]):
            start, end = part.start, part.end
            if generation.cancelled():
                return None
            if following is not None:  # what the next chunk needs from disk arrives while this one computes
                self._runner.hint(ids, following.start, following.end)
            began_ns = time.monotonic_ns()
            logits = self._read(generation, slot, part, steered=end <= asked)
            if logits is None:
                return None
            self._counters.prefill_ns += time.monotonic_ns() - began_ns
            self._counters.prompt_tokens += end - start
            if part.mark:
                self._runner.checkpoint(slot)
            self._publish()
            yield
        return None if logits is None else logits.copy()  # others' windows may run before it is drawn from

    def _read(self, generation: Generation, slot: int, part: Part, *, steered: bool) -> Logits | None:
        """The logits after a part of the prompt, where it is the last one; or None when cancelled."""
        ids, end = generation.request.prompt_ids, part.end
        if steered or end - part.start > self._windows_up_to:
            wanted = "last" if end == len(ids) else "none"
            window = Window.of_sequence(list(ids[part.start : end]), part.start, slot, logits=wanted, steered=steered)
            return self._step("prefill", window, generation)
        logits = None
        for start in range(part.start, end, limits.MAX_WINDOW_TOKENS):
            rows = list(ids[start : min(start + limits.MAX_WINDOW_TOKENS, end)])
            logits = self._step("prefill", Window.of_sequence(rows, start, slot, logits="all"), generation)
            if logits is None:
                return None
            self._counters.window_tokens += len(rows)
        return None if logits is None else logits[-1:]

    def _compile(self, request: Request) -> Compiling | None:
        if not request.grammar:
            return None
        if self._grammars is None:
            raise BadGrammar("this lane has no grammars")
        return self._grammars.begin(request.grammar, request.replayed_ids, sorted(request.stop_ids))

    def _decode(self, generation: Generation, slot: int, logits: Logits, grammar: Grammar | None) -> Running:
        answer = Answer(generation.request, logits.shape[1], grammar)
        drafting = self._drafter.begin(generation.request)
        sending = Sending(generation, self._counters, self._publish)

        def catch_up() -> None:
            sending.send()
            drafting.settle()

        try:
            emitted = self._emit(generation, answer, drafting, sending, logits, ())
            while not emitted.reason:
                if not self.alone:  # another's step comes before the window
                    catch_up()
                yield
                emitted = self._round(generation, slot, answer, drafting, sending, catch_up)
        finally:
            catch_up()
        return Outcome(emitted.reason, emitted.error)

    def _round(
        self, generation: Generation, slot: int, answer: Answer, drafting: Drafting, sending: Sending,
        catch_up: Meanwhile,
    ) -> Emitted:  # fmt: skip
        """One decode window: the last token and drafts go in, the state moves by the rows that were right. Beside it
        the round before is caught up with."""
        clock = self._drafter.clock  # what drafts cost and bring is told by one clock
        began_ns = clock()
        place = answer.position - 1  # of the last token, which is not in the state yet
        most = answer.left - 1  # at least one token is no draft
        proposal = drafting.propose(slot, answer.last, place, most, sending.send)
        rows, trial = [answer.last, *proposal.ids], bool(proposal.ids)
        asked_ns = clock()
        window = Window.of_sequence(rows, place, slot, logits="all", trial=trial, best=answer.greedy)
        logits = self._step("decode", window, generation, catch_up)
        if logits is None:
            return Emitted("cancelled")
        window_ns = clock() - asked_ns
        emitted = self._emit(generation, answer, drafting, sending, logits, proposal.ids)  # may wait for the reader
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
        self, generation: Generation, answer: Answer, drafting: Drafting, sending: Sending, logits: Logits,
        drafts: Sequence[int],
    ) -> Emitted:  # fmt: skip
        """Draws a token from each row, for as long as the row after it was computed for that token."""
        for right, (row, draft) in enumerate(zip(logits, (*drafts, None), strict=True)):
            if generation.cancelled():
                return Emitted("cancelled", right, right)
            try:
                token = answer.take(int(row)) if logits.ndim == 1 else answer.draw(row)
            except BadGrammar as error:
                return Emitted("error", right, right, error)
            if not sending.add(token):
                return Emitted("error", right, right, SlowReader("the client stopped reading"))
            answer.sent += 1
            drafting.add(token.id)
            if reason := answer.end():
                return Emitted(reason, right, right)
            if token.id != draft:
                return Emitted("", right, right + (draft is not None))
        raise AssertionError("the last row has no draft")

    def _step(self, kind: str, window: Window, generation: Generation, meanwhile: Meanwhile = nothing) -> Logits | None:
        """One window and, but for a trial, the safe point after it; None when a cancel left it half way."""

        def stopped() -> bool:  # asked before every layer
            self._watch.progress()
            return generation.cancelled()

        self._watch.begin(kind)
        logits = self._runner.forward(window, stopped, meanwhile)
        if logits is None or not window.trial:
            self._runner.end_window()
        if logits is None:
            return None
        self._watch.done()
        self._counters.windows += 1
        if not (min(logits.tolist()) >= 0 if window.best else np.isfinite(logits).all()):
            raise NonFiniteLogits("the model's logits are not finite")
        return logits
