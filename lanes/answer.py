"""The output of one generation as it grows: draws the next token, and knows when it was the last.

Not here: where logits come from, sending (engine). Drafts change nothing here: a token is a function of (its row of
logits, request, output so far), whatever window the row was in.
"""

from __future__ import annotations

import time

from lanes.grammar import Grammar
from lanes.outbox import Token
from lanes.penalties import Penalties
from lanes.request import Request
from lanes.runner import Row
from lanes.sampler import Logprobs, choose, logprobs


class Answer:
    """`position` is the place in the sequence that the next token takes, `sent` counts the ones that were drawn."""

    def __init__(self, request: Request, vocab_size: int, grammar: Grammar | None = None) -> None:
        self.position, self.sent, self.last = len(request.prompt_ids), 0, -1
        self._request, self._penalties, self._grammar = request, Penalties(request, vocab_size), grammar

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self._request.new_tokens - self.sent

    @property
    def greedy(self) -> bool:
        """From here on a row's token is the id of its greatest logit, and nothing else of the row is used."""
        request = self._request
        plain = request.sampling.temperature == 0.0 and not request.logprobs
        return plain and self._grammar is None and self._penalties.none

    def take(self, token: int) -> Token:
        """The next token, where it is a row's greatest (`greedy`)."""
        return self._drawn(token, None)

    def draw(self, row: Row) -> Token:
        """The next token, from its raw logits [V]. BadGrammar when the grammar has no next one."""
        request = self._request
        drawn_from = self._penalties.row(row)
        if self._grammar is not None:
            drawn_from = self._grammar.row(drawn_from, row)
        token = choose(drawn_from, request.sampling, self.position)
        return self._drawn(token, logprobs(row, token, request.top_logprobs) if request.logprobs else None)

    def _drawn(self, token: int, logprobs: Logprobs | None) -> Token:
        self._penalties.add(token)
        if self._grammar is not None:
            self._grammar.add(token)
        self.position, self.last = self.position + 1, token
        return Token(token, time.monotonic_ns(), logprobs)

    def end(self) -> str:
        """Why the token that was sent last is the last one; empty when it is not."""
        if self.last in self._request.stop_ids:
            return "stop"
        return "length" if self.left == 0 else ""
