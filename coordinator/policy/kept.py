"""Where the conversations of the last sessions are kept, in lanes' memory or in the host's pool: for people to look at.

    a prompt is placed ──▶ its chains ──▶ whenever somebody looks: PrefixIndex ──▶ tokens by place

Not here: placement, which asks the index itself. Pure. Invariants: at most `limits.PAGE_CONVERSATIONS` sessions, the
one that asked longest ago is forgotten first; sessions of two tenants are two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.policy.prefixes import PrefixIndex


@dataclass(frozen=True, slots=True)
class Kept:
    """One conversation: of its last prompt, what need not be read again, by place."""

    tenant: str
    session: str
    asked_s: float  # when, by the clock that placed it
    prompt_tokens: int
    lane_tokens: Mapping[str, int]
    parked_tokens: int


@dataclass(frozen=True, slots=True)
class _Asked:
    at_s: float
    prompt_tokens: int
    chains: Sequence[bytes]


class Conversations:
    """One per coordinator."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], _Asked] = OrderedDict()

    def asked(self, tenant: str, session: str, prompt_tokens: int, chains: Sequence[bytes], now: float) -> None:
        """A prompt of that session was given to a lane; `chains[k]` is the chain after k + 1 of its blocks."""
        self._last[tenant, session] = _Asked(now, prompt_tokens, chains)
        self._last.move_to_end((tenant, session))
        if len(self._last) > limits.PAGE_CONVERSATIONS:
            self._last.popitem(last=False)

    def kept(self, index: PrefixIndex) -> list[Kept]:
        """Who asked last comes first; those of which nothing is left are there, too."""
        found = []
        for (tenant, session), asked in reversed(self._last.items()):
            lanes, parked = index.places(asked.chains, asked.prompt_tokens)
            found.append(Kept(tenant, session, asked.at_s, asked.prompt_tokens, lanes, parked))
        return found
