"""One conversation in the lane's memory: its state, its tokens, its checkpoints.

Not here: budgets, choosing, parking (conversations). Invariant: `ids[:length]` are the tokens that the state holds;
every checkpoint's position is at most that; a chain value stands for tokens that a finished pass has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laneproto.chain import BLOCK_TOKENS, EMPTY, chain
from lanes import limits
from lanes.state.checkpoint import Checkpoint
from lanes.state.pool import Branch
from lanes.state.reuse import Ids, common_prefix
from lanes.state.sequence import SequenceState


class Resident:
    """A conversation and where it can be taken up again."""

    __slots__ = (
        "_chain", "_ids", "busy", "checkpoints", "inherited", "lent_bytes", "pages", "parked", "parked_as",
        "slot", "state", "tenant", "used",
    )  # fmt: skip

    def __init__(self, slot: int, state: SequenceState, tenant: bytes, ids: Ids | None = None) -> None:
        self.slot, self.state, self.tenant = slot, state, tenant
        self.busy, self.used = True, 0
        self.lent_bytes = 0  # of the pool, until it is parked: then it goes
        self.checkpoints: dict[int, Checkpoint] = {}  # by position, ascending
        self.parked = 0  # tokens of it that the park pool has with a checkpoint at their end
        self.parked_as = (b"", 0)  # generation of the pool, number there
        self.pages: list[bytes] = []  # digests of the first whole pages, which do not change
        self.inherited: list[tuple[int, int, bytes]] = []  # (tokens, waiting, digest) of checkpoints only the pool has
        self._ids: Ids = np.zeros(0, np.uint32) if ids is None else ids.copy()
        self._chain: list[bytes] = []

    @property
    def length(self) -> int:
        """Tokens in the state; of a broken one, those before the pass that broke it."""
        return self.state.length

    @property
    def ids(self) -> Ids:
        """The tokens in the state, uint32 [length]."""
        return self._ids[: self.length]

    def write(self, start: int, ids: Sequence[int] | Ids | npt.NDArray[np.int64]) -> None:
        """The rows from `start` on are of these tokens; what stood there was not kept."""
        end = start + len(ids)
        if end > self._ids.shape[0]:
            grown = np.zeros(max(end, 2 * self._ids.shape[0]), np.uint32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:end] = ids
        del self._chain[start // BLOCK_TOKENS :]

    def positions(self) -> list[int]:
        """Where it can be taken up, ascending: checkpoints, and the end of a state that is whole."""
        end = [] if self.state.broken or self.length == 0 else [self.length]
        return sorted({*self.checkpoints, *end})

    def match(self, prompt: Ids) -> int:
        """The longest position whose tokens the prompt begins with, one token or more before its end; 0 is none."""
        equal = common_prefix(self.ids, prompt[:-1])
        return max((position for position in self.positions() if position <= equal), default=0)

    def chain_at(self, position: int) -> bytes:
        """The chain's value of the whole blocks before a position."""
        blocks = position // BLOCK_TOKENS
        known = len(self._chain)
        if blocks > known:
            after = self._chain[-1] if self._chain else EMPTY
            ids = self._ids[known * BLOCK_TOKENS : blocks * BLOCK_TOKENS].tolist()
            self._chain += chain(ids, self.tenant, after=after)
        return self._chain[blocks - 1] if blocks else EMPTY

    def back_to(self, position: int) -> None:
        """Goes back to one of `positions`; later checkpoints must be gone."""
        if position != self.length or self.state.broken:
            self.checkpoints[position].into(self.state)
            self.state.cut(self.state.settled)
            self.parked = min(self.parked, position)
            del self.pages[position // limits.PAGE_TOKENS :]
            self.inherited = [one for one in self.inherited if one[0] <= position]
            del self._chain[position // BLOCK_TOKENS :]

    def branch(self, position: int) -> Branch:
        """What a conversation that goes on from a checkpoint takes over."""
        return Branch(self.state, position - self.checkpoints[position].waiting, position)

    def take_over(self, source: Resident, position: int) -> None:
        """A conversation with the rows of the source's branch goes on from there."""
        source.checkpoints[position].into(self.state)
        self.pages = source.pages[: position // limits.PAGE_TOKENS]
        self.inherited = [one for one in source.inherited if one[0] <= position]
        self.write(0, source._ids[:position])
