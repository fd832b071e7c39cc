"""The rounds of drafts as the engine sees them: propose before a window, learn after it.

Between two windows the device has nothing to do, so what can wait is learnt beside its next work (`settle`), a pass of
the draft layer or a window.

    Drafter     one per lane: what it has learnt about costs and proposers outlives a generation
    Drafting    one per generation: its lookup index

Not here: deciding (policy), guessing (chain, lookup), checking: a draft is right when it is the token that the engine
draws from the model's own logits at that place.

Invariant: a proposal never has more ids than asked for, all in the vocabulary; with `most` 0 nothing is ever proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lanes.drafts import policy
from lanes.drafts.chain import at_once, chain
from lanes.drafts.lookup import Lookup
from lanes.drafts.policy import Beliefs, Guessed, Round
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.request import Request
from lanes.runner import Likeliest, Row
from lanes.window import Meanwhile, nothing

# (slot, token, number, best, meanwhile): `Runner.guess`
LayerGuess = Callable[[int, int, int, int, Meanwhile], "Row | Sequence[Likeliest] | None"]


@dataclass(slots=True, eq=False)
class Drafter:
    """Drafts of one lane, at most `most` a round; `layer` is None where the model has no draft layer."""

    most: int
    layer: LayerGuess | None = None
    vocabulary: Sequence[int] | None = None  # tokens of the layer's logits; None: all, in order
    chains: bool = False  # the layer makes several greedy guesses in one call
    clock: Callable[[], int] = time.monotonic_ns
    beliefs: Beliefs = field(default_factory=Beliefs)

    def begin(self, request: Request) -> Drafting:
        """A new generation."""
        return Drafting(self, request, Lookup(request.prompt_ids) if self.most else None)


@dataclass(slots=True, eq=False)
class Drafting:
    """Drafts of one generation."""

    drafter: Drafter
    request: Request
    lookup: Lookup | None
    _guessed: Guessed = field(default_factory=Guessed)
    _draft_ns: int = 0
    _due: Round | None = None  # is not learnt yet

    def add(self, token: int) -> None:
        """The answer has one more token."""
        if self.lookup is not None:
            self.lookup.add(token)

    def propose(self, slot: int, token: int, position: int, most: int, meanwhile: Meanwhile = nothing) -> Proposal:
        """Drafts after `token`, the answer's last, which stands at `position` and has been told to `add`.

        `meanwhile()` is called where a draft layer is asked, while it guesses or before; then `settle` is.
        """

        def beside() -> None:
            meanwhile()
            self.settle()

        drafter, began_ns = self.drafter, self.drafter.clock()
        self._guessed = Guessed()
        proposal = self._proposal(slot, token, position, min(most, drafter.most), beside)
        self._draft_ns = drafter.clock() - began_ns
        return proposal

    def learn(self, proposal: Proposal, right: int, checked: int, window_ns: int) -> None:
        """The window after `propose` is over: its time, with the commit's. To be followed by `settle` before another
        generation goes on."""
        if self.drafter.most:
            self.settle()
            self._due = Round(proposal, self._guessed, self._draft_ns, window_ns, right, checked)
            if not policy.may_wait(self.drafter.beliefs, self._due):
                self.settle()

    def settle(self) -> None:
        """The last round is learnt by now."""
        if (due := self._due) is not None:
            self._due, self.drafter.beliefs = None, policy.learn(self.drafter.beliefs, due)

    def _proposal(self, slot: int, token: int, position: int, most: int, meanwhile: Meanwhile) -> Proposal:
        beliefs, layer = self.drafter.beliefs, self.drafter.layer
        if most < 1:
            return NOTHING
        if self.lookup is not None and (room := policy.may_try(beliefs, "lookup", most)):
            copied = self.lookup.propose(room)
            while copied.ids and not policy.worth(beliefs, "lookup", copied.sure):
                copied = Proposal("lookup", copied.ids[:-1], copied.sure[:-1])
            if copied.ids:
                return copied
        if layer is None:
            return NOTHING
        sampling, vocabulary = self.request.sampling, self.drafter.vocabulary
        best = sampling.temperature == 0.0
        chains = self.drafter.chains and best
        if not (room := policy.may_try(beliefs, "layer", most, at_once=chains)):
            return NOTHING
        if chains:
            proposal, self._guessed = at_once(
                beliefs, lambda token, count: layer(slot, token, 0, count, meanwhile), token, room, vocabulary
            )  # fmt: skip
            return proposal

        def guess(token: int, number: int) -> Row | Sequence[Likeliest] | None:
            return layer(slot, token, number, int(best), nothing if number else meanwhile)

        proposal, self._guessed = chain(beliefs, guess, token, position + 1, sampling, room, vocabulary)
        return proposal
