"""What the host's pool has, as a lane knows it: the owner's index without the bytes.

It may be a moment old: who acts on it asks the owner (`ParkClient.pin`). Pure. Invariant: after all changes it has
exactly the owner's conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laneproto.chain import BLOCK_TOKENS
from shared_experts.park_client import Parked

Place = tuple[bytes, bytes, int]  # tenant, chain, tokens


class ParkMirror:
    """Parked conversations by number, and by where they can be taken up."""

    def __init__(self) -> None:
        self.sequence = 0
        self._entries: dict[int, Parked] = {}
        self._places: dict[tuple[bytes, bytes], dict[int, list[int]]] = {}  # (tenant, chain) -> tokens -> numbers

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, sequence: int, void: bool, removed: Sequence[int], entries: Sequence[Parked]) -> bool:
        """Takes over one reply; True when something is different."""
        if void:
            self._entries.clear()
            self._places.clear()
        for number in removed:
            self.forget(number)
        for entry in entries:
            self.forget(entry.number)
            self._entries[entry.number] = entry
            for tokens, value in entry.marks:
                self._places.setdefault((entry.tenant, value), {}).setdefault(tokens, []).append(entry.number)
        self.sequence = sequence
        return bool(void or removed or entries)

    def forget(self, number: int) -> None:
        """It is gone, or no good."""
        entry = self._entries.pop(number, None)
        for tokens, value in entry.marks if entry else ():
            assert entry is not None
            there = self._places[entry.tenant, value]
            there[tokens].remove(number)
            if not there[tokens]:
                del there[tokens]
            if not there:
                del self._places[entry.tenant, value]

    def longest(self, tenant: bytes, values: Sequence[bytes], most_tokens: int) -> tuple[int, int] | None:
        """(number, tokens) of the longest place on this chain (`values[b]` after b blocks), the latest of equals."""
        for blocks in range(len(values) - 1, -1, -1):
            there = self._places.get((tenant, values[blocks]), {})
            fitting = [tokens for tokens in there if tokens <= most_tokens and tokens // BLOCK_TOKENS == blocks]
            if fitting:
                tokens = max(fitting)
                return max(there[tokens]), tokens
        return None

    def tokens(self, number: int) -> int:
        """How far a conversation can be taken up; 0 when it is not there."""
        entry = self._entries.get(number)
        return max((tokens for tokens, _ in entry.marks), default=0) if entry else 0

    def prefixes(self) -> Iterator[tuple[bytes, int]]:
        """(chain, tokens) of every place."""
        for (_, value), there in self._places.items():
            for tokens in there:
                yield value, tokens
