"""An n-gram table of a pack as a model sees it: torch tensors in and out, the hash constants, the lane's counters.

Of a few tokens rows are read when they are asked for; those of more are gathered ahead (`lanes.models.ahead`).
Not here: reading (`shared_experts.row_reader`). Invariant: an error of the disk leaves as `TableReadFailed`, whose
message holds no path; the log has the place.

Letters: R rows of a window, N heads, D row columns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import numpy.typing as npt
import structlog
import torch

from lanes.counters import Counters
from lanes.errors import TableReadFailed
from lanes.models.ahead import FEW_TOKENS, Ahead, Ids
from shared_experts.errors import NgramReadError
from shared_experts.row_reader import RowCounters, RowReader

_log = structlog.get_logger(__name__)

PIECE_ROWS = 4096  # gathered at once: whoever gives up, or closes the file, waits for no more
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # of a table's rows


class PackTable:
    """One layer's table; used by the engine's thread only."""

    def __init__(self, reader: RowReader, counters: Counters, *, pinned: bool = False) -> None:
        """`pinned`: rows of many tokens lie in pinned memory, for a GPU."""
        self._reader, self._counters = reader, counters
        self._ahead = Ahead(functools.partial(_gathered, reader, pinned), "ngram-rows")
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
        """[R, N * D] for row ids int64 [R, N]: fp32, or of many tokens the table's own type."""
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
        self._count(gathered=gathered)
        return found.view(ids.shape[0], -1)

    def taker(self, ids: Ids, out: npt.NDArray[np.float32]) -> Callable[[int], bool]:
        """`take(r)`: `rows` of the first r of `ids` [R, N] into `out` [R, N * D], few tokens' and as soon as can be; or
        False, and `rows` says why not. Counted when `count` is called, before other rows are asked for."""
        heads, columns = ids.shape[1], self._reader.info.columns
        take = self._reader.taker(ids.reshape(-1), out.reshape(-1, columns))
        return lambda rows: take(rows * heads)

    def count(self) -> None:
        """What was taken is counted."""
        self._count(gathered=False)

    def forget(self) -> None:
        """What was prefetched will not be asked for."""
        self._ahead.forget()
        self._reader.forget()

    def _count(self, *, gathered: bool) -> None:
        """`gathered`: whoever waited for these rows was not the one who asks."""
        now, before, counters = self._reader.counters(), self._seen, self._counters
        counters.ngram_rows += now.asked - before.asked
        counters.ngram_cache_hits += now.hits - before.hits
        hits, asked = now.hits - before.hits, now.asked - before.asked
        counters.ngram_prefetch_hits += asked - hits if gathered else now.ahead - before.ahead
        counters.ngram_read_bytes += now.read_bytes - before.read_bytes
        counters.ngram_wait_ns += 0 if gathered else now.wait_ns - before.wait_ns
        self._seen = now


def _gathered(reader: RowReader, pinned: bool, ids: Ids, given_up: Callable[[], bool]) -> torch.Tensor:
    """Rows [N, C] as they are stored: no number of theirs passes through the interpreter."""
    info = reader.info
    rows = torch.empty((len(ids), info.row_bytes), dtype=torch.uint8, pin_memory=pinned)
    into = rows.numpy()
    for piece in (slice(first, first + PIECE_ROWS) for first in range(0, len(ids), PIECE_ROWS)):
        if given_up():
            raise CancelledError
        reader.read(ids[piece], into[piece])
    return rows.view(KINDS[info.dtype])
