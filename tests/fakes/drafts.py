"""Proposers that tests and only tests use: they know the answer, and are wrong exactly where they are told to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lanes.drafts.drafter import Drafter, Drafting
from lanes.drafts.policy import LEVELS, Beliefs
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.drafts.times import Mean
from lanes.request import Request

Script = Callable[[int, int], Sequence[int]]  # (place of the first draft, most) to ids


@dataclass(slots=True, eq=False)
class ScriptedDrafter(Drafter):
    """Every round drafts what the script says, whatever it costs."""

    script: Script = lambda place, most: ()
    rounds: list[tuple[int, int, int]] = field(default_factory=list)  # (drafts, right, compared)

    def begin(self, request: Request) -> Drafting:
        return ScriptedDrafting(self, request, None)


class ScriptedDrafting(Drafting):
    def propose(self, slot: int, token: int, position: int, most: int, meanwhile: object = None) -> Proposal:
        ids = tuple(self.drafter.script(position + 1, most))[:most]
        return Proposal("lookup", ids, (0.9,) * len(ids)) if ids else NOTHING

    def learn(self, proposal: Proposal, right: int, checked: int, window_ns: int) -> None:
        assert window_ns > 0
        self.drafter.rounds.append((len(proposal.ids), right, checked))


def oracle(prompt: Sequence[int], answer: Sequence[int], drafts: int, wrong_at: Callable[[int], bool]) -> Script:
    """Drafts of the known answer; the token at place p of the sequence is another one where `wrong_at(p)`."""
    known = [*prompt, *answer]

    def script(place: int, most: int) -> list[int]:
        return [known[p] ^ 1 if wrong_at(p) else known[p] for p in range(place, min(place + drafts, len(known)))]

    return script


def scripted(script: Script) -> ScriptedDrafter:
    """A drafter of up to three a round."""
    return ScriptedDrafter(3, script=script)


def convinced() -> Beliefs:
    """What a lane believes that has found drafts to be free and always right, and cannot be told otherwise."""
    always = 10**9
    beliefs = Beliefs(windows_ns=(Mean(1e15, always),) * 4, spare=4.0, guess_ns=Mean(1.0, always))
    trust = {
        source: replace(each, right=((1.0,) * LEVELS,) * 3, gain=Mean(1.0, always))
        for source, each in beliefs.trust.items()
    }
    return replace(beliefs, trust=trust, tokens=Mean(1.0, always), round_ns=Mean(1e15, always))
