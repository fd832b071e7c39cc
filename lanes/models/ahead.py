"""Rows of an n-gram table gathered beside the engine: a long window's are in one piece of memory before it asks.

    ahead(ids)      a thread begins to gather; what is there already, or on its way, is not begun again
    take(ids)       the rows, waited for; None where they were not gathered, or given up

Of a chunk of 8,192 tokens 131,072 rows: 80 ms of one core, which a GPU would wait for in every chunk. At most two
windows' rows are held, the one that runs and the next one's.
Not here: which rows, small windows (pack_table), the disk (shared_experts.row_reader).
Invariant: what `take` gives is what `RowReader.rows` gave for these ids, or its error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import numpy as np
import numpy.typing as npt
import torch

from shared_experts.row_reader import RowReader

Ids = npt.NDArray[np.int64]

HELD = 2
PIECE_ROWS = 4096  # asked for at once: whoever gives up, or closes the file, waits for no more


@dataclass(frozen=True, slots=True)
class _Gather:
    """One window's."""

    ids: Ids
    rows: Future[torch.Tensor]
    given_up: Event = field(default_factory=Event)

    def give_up(self) -> None:
        self.given_up.set()
        self.rows.cancel()


class RowsAhead:
    """Of one reader; one thread calls it. On a GPU rows lie in pinned memory."""

    def __init__(self, reader: RowReader, *, pinned: bool) -> None:
        self._reader, self._pinned = reader, pinned
        self._gathers: list[_Gather] = []
        # The process may later be told to keep to the engine's core, which this is meant to leave alone.
        cores = sorted(os.sched_getaffinity(0))
        self._cores = set(cores[1:] or cores)
        self._thread: ThreadPoolExecutor | None = None

    def ahead(self, ids: Ids) -> None:
        """Begins to gather the rows of `ids` [N]; never waits."""
        if any(np.array_equal(gather.ids, ids) for gather in self._gathers):
            return
        while len(self._gathers) >= HELD:
            self._gathers.pop(0).give_up()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "ngram-rows", self._settle)
        given_up = Event()
        future = self._thread.submit(_gathered, self._reader, ids, self._pinned, given_up.is_set)
        self._gathers.append(_Gather(ids, future, given_up))

    def take(self, ids: Ids) -> torch.Tensor | None:
        """fp32 [N, C]; raises what the reader raised."""
        for number, gather in enumerate(self._gathers):
            if np.array_equal(gather.ids, ids):
                del self._gathers[number]
                with contextlib.suppress(CancelledError):
                    return gather.rows.result()
        return None

    def forget(self) -> None:
        """Nobody will take what is gathered."""
        while self._gathers:
            self._gathers.pop().give_up()

    def _settle(self) -> None:
        with contextlib.suppress(OSError):  # of cores that were taken away meanwhile
            os.sched_setaffinity(0, self._cores)


def _gathered(reader: RowReader, ids: Ids, pinned: bool, given_up: Callable[[], bool]) -> torch.Tensor:
    pieces = [slice(first, first + PIECE_ROWS) for first in range(0, len(ids), PIECE_ROWS)]
    for piece in pieces:
        reader.prefetch(ids[piece])
    rows = torch.empty((len(ids), reader.info.columns), pin_memory=pinned)
    into = rows.numpy()
    for piece in pieces:
        if given_up():
            raise CancelledError
        into[piece] = reader.rows(ids[piece])
    return rows
