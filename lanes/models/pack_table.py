"""An n-gram table of a pack as a model sees it: torch tensors in and out, the hash constants, the lane's counters.

Of a few tokens rows are read when they are asked for; those of more are gathered ahead (`lanes.models.ahead`).
Not here: reading (`shared_experts.row_reader`). Invariant: an error of the disk leaves as `TableReadFailed`, whose
message holds no path; the log has the place.

Letters: R rows of a window, N heads, D row columns.
"""

from __future__ import annotations

import time

import structlog
import torch

from lanes.counters import Counters
from lanes.errors import TableReadFailed
from lanes.models.ahead import RowsAhead
from shared_experts.errors import NgramReadError
from shared_experts.row_reader import RowCounters, RowReader

_log = structlog.get_logger(__name__)

FEW_TOKENS = 64  # whose rows are found faster than a thread wakes up


class PackTable:
    """One layer's table; used by the engine's thread only."""

    def __init__(self, reader: RowReader, counters: Counters, *, pinned: bool = False) -> None:
        """`pinned`: rows of many tokens lie in pinned memory, for a GPU."""
        self._reader, self._counters = reader, counters
        self._ahead = RowsAhead(reader, pinned=pinned)
        self._seen = RowCounters()  # what `counters` has already
        info = reader.info
        _log.info("ngram_table", layer=info.layer, mode=reader.mode, cache_rows=reader.counters().capacity_rows)
        self.multipliers = torch.tensor(info.multipliers, dtype=torch.int64)  # as the checkpoint stored them
        self.offsets = torch.tensor(info.head_offsets, dtype=torch.int64)
        self.sizes = torch.tensor(info.head_vocab_sizes, dtype=torch.int64)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Begins to read the rows of ids int64 [R, N]; never waits."""
        begin = self._reader.prefetch if ids.shape[0] <= FEW_TOKENS else self._ahead.ahead
        begin(ids.flatten().numpy())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [R, N * D] for row ids int64 [R, N]."""
        flat, found = ids.flatten().numpy(), None
        try:
            if ids.shape[0] > FEW_TOKENS:
                began_ns = time.perf_counter_ns()
                found = self._ahead.take(flat)
                self._counters.ngram_wait_ns += time.perf_counter_ns() - began_ns
            gathered = found is not None
            if found is None:
                found = torch.from_numpy(self._reader.rows(flat))
        except NgramReadError as error:
            _log.error(
                "ngram_read_failed", file=error.file, layer=error.layer, offset=error.offset, reason=error.reason
            )
            raise TableReadFailed(f"a row of the n-gram table of layer {error.layer} cannot be read") from error
        self._count(waited=not gathered)
        return found.view(ids.shape[0], -1)

    def forget(self) -> None:
        """What was prefetched will not be asked for."""
        self._ahead.forget()
        self._reader.forget()

    def _count(self, *, waited: bool) -> None:
        """`waited`: so did whoever asked, not only who gathered."""
        now, before, counters = self._reader.counters(), self._seen, self._counters
        counters.ngram_rows += now.asked - before.asked
        counters.ngram_cache_hits += now.hits - before.hits
        counters.ngram_prefetch_hits += now.ahead - before.ahead
        counters.ngram_read_bytes += now.read_bytes - before.read_bytes
        counters.ngram_wait_ns += (now.wait_ns - before.wait_ns) * waited
        self._seen = now
