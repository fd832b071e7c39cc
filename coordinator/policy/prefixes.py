"""Which lane remembers which beginnings of prompts, as the lanes themselves say.

    chain of a prompt's blocks of 64 tokens ──longest first──▶ {lane: tokens}; parked: its host

Not here: hearing it from lanes (roster), making chains (the wire's own module). Pure. Invariants: at most
`limits.KNOWN_PREFIXES` per lane, the one told longest ago is forgotten first; what a dead process knew is gone with it,
what is parked stays until it is said to be gone. A chain is a hint: the lane compares tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from coordinator import limits
from coordinator.policy.host_names import host_of


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that need not be read again. `chain` is that of its whole blocks."""

    chain: bytes
    tokens: int
    parked: bool = False  # in the host's pool, not in the lane's own memory


@dataclass(slots=True)
class _Known:
    """Who remembers a chain, and with how many tokens: several beginnings may end in the same open block."""

    live: dict[str, set[int]] = field(default_factory=dict)
    parked: dict[str, set[int]] = field(default_factory=dict)


class PrefixIndex:
    """Prefixes of all lanes."""

    def __init__(self) -> None:
        self._by_chain: dict[bytes, _Known] = {}
        self._of_lane: dict[str, OrderedDict[tuple[bytes, int], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_lane.values()))

    def add(self, lane: str, prefixes: Iterable[Prefix]) -> None:
        """The lane remembers these, or in another place than before."""
        told = self._of_lane.setdefault(lane, OrderedDict())
        for prefix in prefixes:
            self.remove(lane, [prefix])
            known = self._by_chain.setdefault(prefix.chain, _Known())
            (known.parked if prefix.parked else known.live).setdefault(lane, set()).add(prefix.tokens)
            told[prefix.chain, prefix.tokens] = None
            if len(told) > limits.KNOWN_PREFIXES:
                self.remove(lane, [Prefix(*next(iter(told)))])

    def remove(self, lane: str, prefixes: Iterable[Prefix]) -> None:
        """The lane remembers these no more, wherever they were."""
        told = self._of_lane.get(lane, OrderedDict())
        for prefix in prefixes:
            if (prefix.chain, prefix.tokens) not in told:
                continue
            del told[prefix.chain, prefix.tokens]
            known = self._by_chain[prefix.chain]
            for place in (known.live, known.parked):
                if lane in place:
                    place[lane].discard(prefix.tokens)
                    if not place[lane]:
                        del place[lane]
            if not known.live and not known.parked:
                del self._by_chain[prefix.chain]

    def forget(self, lane: str) -> None:
        """Its process is gone, or begins to tell everything anew."""
        self.remove(lane, [Prefix(*each) for each in self._of_lane.get(lane, ())])
        self._of_lane.pop(lane, None)

    def places(self, chains: Sequence[bytes], at_most: int) -> tuple[dict[str, int], int]:
        """Tokens of a prompt that each lane has in its own memory, and that are parked on some host; of `at_most`."""
        lanes: dict[str, int] = {}
        parked = 0
        for value in chains:
            if (known := self._by_chain.get(value)) is not None:
                lanes.update({lane: min(max(tokens), at_most) for lane, tokens in known.live.items()})
                parked = min(max(map(max, known.parked.values())), at_most) if known.parked else parked
        return lanes, parked

    def remembered(self, chains: Sequence[bytes], lanes: Collection[str]) -> dict[str, float]:
        """Tokens of a prompt that lanes need not read, of those that remember any; `chains[k]` is the chain after k + 1
        blocks. What is parked counts a little less than what the lane has at hand.
        """
        found: dict[str, float] = {}
        parked: dict[str, float] = {}  # by host: what lies in one's pool is out of another's reach
        by_chain = self._by_chain
        # Of a prompt's chains (1,562 in 100,000 tokens) the index knows few: no line of Python for the others.
        for chain in filter(by_chain.__contains__, reversed(chains)):
            known = by_chain[chain]
            for lane, tokens in known.parked.items():
                host, worth = host_of(lane), limits.PARKED_WORTH * max(tokens)
                parked[host] = max(parked.get(host, 0.0), worth)
            for lane, tokens in known.live.items():
                if lane not in found and lane in lanes:
                    found[lane] = float(max(tokens))
            if len(found) == len(lanes):
                break
        if parked:
            for lane in lanes:
                if worth := parked.get(host_of(lane), 0.0):
                    found[lane] = max(found.get(lane, 0.0), worth)
        return found
