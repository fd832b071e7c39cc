"""A window that has ended, put aside so that it can be counted while the next one runs.

Not here: when (experts), what the cache makes of it. Invariant: everything is as it was when the window ran, whatever
has become of tables and logs since.

Letters: N log entries, R rows, K experts per row, L layers, E experts, D distinct keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lanes.counters import Counters
from lanes.experts.gpu.prompt import Borrowed
from lanes.experts.gpu.share import Lapse
from lanes.experts.policy import Ints, Touched


class Ended(NamedTuple):
    """Copies of what the window left."""

    log: npt.NDArray[np.int32]  # [N, R, K] what was chosen and whose it was (lanes.kernels.post), -1: nothing ran
    first_key: Ints  # [N, 1, 1] of each entry's layer
    wide: npt.NDArray[np.int64] | None  # [L, E]: uses in windows too long for the log
    resident: npt.NDArray[np.bool_]  # [L, E]
    kept: int  # rows that were right
    borrowed: Borrowed | None
    lapse: Lapse | None = None  # where the CPU had its share

    def touched(self) -> Touched:
        """What the cache learns from."""
        keys, rows = self._uses(self.kept)
        # A draft layer runs several times in a window: its experts count for at most as many rows as the window had.
        kept = max(1, self.kept)
        return Touched(keys, np.minimum(rows, kept), kept)

    def tell(self, counters: Counters, record_bytes: int) -> None:
        """Pairs, and the bytes of every expert once per window."""
        keys, rows = self._uses(self.log.shape[1])
        hit = self.resident.reshape(-1)[keys]
        hits, hit_bytes = int(rows[hit].sum()), int(hit.sum()) * record_bytes
        counters.expert_hits += hits
        counters.expert_misses += int(rows.sum()) - hits
        counters.expert_hit_bytes += hit_bytes
        counters.expert_miss_bytes += len(keys) * record_bytes - hit_bytes
        of_cpu = (self.log >= 0) & (self.log % 2 == 1)
        counters.expert_cpu_bytes += len(np.unique((self.log // 2 + self.first_key)[of_cpu])) * record_bytes
        if self.borrowed is not None:
            streamed = self.borrowed.streamed()
            counters.streamed_bytes += streamed.records * record_bytes
            counters.streaming_ns += streamed.copying_ns
            counters.stream_wait_ns += streamed.waiting_ns

    def sides(self, layers: int) -> npt.NDArray[np.int64]:
        """[layers, 2]: how many experts of each of the first layers were the CPU's, and how many came by the link."""
        log = self.log[:layers]
        at, row, k = np.nonzero(log >= 0)
        told = log[at, row, k]
        chosen = np.zeros((2, layers, self.resident.shape[1]), np.bool_)
        chosen[1 - told % 2, at, told // 2] = True
        chosen[1] &= ~self.resident[:layers]
        found: npt.NDArray[np.int64] = chosen.sum(axis=2).T
        return found

    def _uses(self, rows: int) -> tuple[Ints, Ints]:
        """(keys ascending, rows of each) [D] of what the first rows chose."""
        log = self.log[:, :rows]
        uses = np.bincount((log // 2 + self.first_key)[log >= 0], minlength=self.resident.size)
        if self.wide is not None:
            uses += self.wide.reshape(-1)
        keys = np.flatnonzero(uses)
        return keys, uses[keys]
