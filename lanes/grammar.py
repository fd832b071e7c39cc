"""What an answer may be: a grammar over the pack's tokens, as a mask of the next row and a state that tokens move.

The grammar library (llguidance) compiles and parses; this file gives it the pack's tokenizer and the lane's rows.

A grammar is compiled in a thread of its own while the prompt is read, and waited for no longer than a limit: the
library cannot be stopped, so a compilation that takes longer ends by itself, with nobody's request behind it.

Not here: where grammars come from (the coordinator writes them), the draw (sampler). Invariants: the state is a
function of (grammar, output so far), so a replay goes on as the lost lane would have; a row never loses all its tokens;
while a generation has a grammar, only tokens that it allows are drawn, and a stop id only where the grammar may end.

Letters: V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lanes import limits
from lanes.errors import BadGrammar

Floats = npt.NDArray[np.float32]


class Grammar:
    """One generation's. Use `Grammars.begin`."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._allowed = np.zeros(vocab_size, bool)
        self._row = np.empty(vocab_size, np.float32)

    def row(self, row: Floats, logits: Floats) -> Floats:
        """The row to draw from: -inf where the grammar forbids. row, logits: [V]; the latter without penalties."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = self._allowed
        known = np.unpackbits(bits, bitorder="little")[: allowed.shape[0]]
        allowed[: known.shape[0]] = known
        allowed[known.shape[0] :] = False
        if self._matcher.is_accepting():
            allowed[self._stop_ids] = True
        if not allowed.any():
            raise BadGrammar("the grammar has no way on")
        np.copyto(self._row, row)
        self._row[~allowed] = -np.inf
        if not np.isfinite(self._row.max()):  # the least length forbids the only way on: then it yields
            np.copyto(self._row, logits)
            self._row[~allowed] = -np.inf
        return self._row

    def add(self, token: int) -> None:
        """The token has become output."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token) and token not in self._stop_ids:
            raise BadGrammar("the grammar's bounds were exceeded")


class Compiling:
    """A grammar on its way. Use `Grammars.begin`."""

    def __init__(self, compile_it: Callable[[], Grammar]) -> None:
        self._compile_it = compile_it
        self._result: Grammar | BadGrammar | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def result(self, stopped: Callable[[], bool] = lambda: False) -> Grammar | None:
        """The grammar; None when `stopped()` first. BadGrammar when there is none, or none within GRAMMAR_COMPILE_S of
        this call."""
        end_s = time.monotonic() + limits.GRAMMAR_COMPILE_S
        while not self._done.wait(limits.GRAMMAR_LOOK_S):
            if stopped():
                return None
            if time.monotonic() > end_s:
                raise BadGrammar("the grammar takes too long to compile")
        if isinstance(self._result, BadGrammar):
            raise self._result
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._compile_it()
        except BadGrammar as error:
            self._result = error
        except Exception as error:  # of the library, whose bugs are not this lane's end
            self._result = BadGrammar(f"the grammar cannot be used: {type(error).__name__}")
        finally:
            self._done.set()


class Grammars:
    """A lane's: the pack's tokenizer in the library's form, made when it is first needed."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids) or [0]
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._limits = LLParserLimits(max_grammar_size=limits.MAX_GRAMMAR_SYMBOLS)

    def begin(self, grammar: str, output: Sequence[int], stop_ids: Sequence[int]) -> Compiling:
        """Compiles; the grammar's state will be that after `output`, which an earlier lane has sent."""
        return Compiling(lambda: self._compile(grammar, output, stop_ids))

    def _compile(self, grammar: str, output: Sequence[int], stop_ids: Sequence[int]) -> Grammar:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadGrammar("the grammar cannot be used")
        if output and not matcher.consume_tokens(list(output)):
            raise BadGrammar("the output so far is not in the grammar")
        return Grammar(matcher, stop_ids, self._vocab_size)

    def _load(self) -> LLTokenizer:
        try:
            with open(self._path, "rb") as file:
                data = file.read(limits.MAX_TOKENIZER_BYTES + 1)
            if len(data) > limits.MAX_TOKENIZER_BYTES:
                raise BadGrammar("the pack's tokenizer is too large")
            text = data.decode()
            try:
                return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
            except ValueError:  # more tokens than the model has rows: those are never drawn
                return LLTokenizer(text, eos_token=self._eos_ids)
        except (OSError, ValueError) as error:
            raise BadGrammar("the pack has no tokenizer that grammars can use") from error
