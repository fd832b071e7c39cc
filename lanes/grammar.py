"""What an answer may be: a grammar over the pack's tokens, as a mask of the next row and a state that tokens move.

The grammar library (llguidance) compiles and parses; this file gives it the pack's tokenizer and the lane's rows.

Not here: where grammars come from (the coordinator writes them), the draw (sampler). Invariants: the state is a
function of (grammar, output so far), so a replay goes on as the lost lane would have; a row never loses all its tokens;
while a generation has a grammar, only tokens that it allows are drawn, and a stop id only where the grammar may end.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

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


class Grammars:
    """A lane's: the pack's tokenizer in the library's form, made when it is first needed."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids) or [0]
        self._tokenizer: LLTokenizer | None = None

    def begin(self, grammar: str, output: Sequence[int], stop_ids: Sequence[int]) -> Grammar:
        """The state after `output`, which an earlier lane has sent. BadGrammar when that cannot be."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
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
