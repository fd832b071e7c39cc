"""What a long window needs of host memory or a disk, gathered beside the engine: it is there before the window asks.

    ahead(ids)      a thread begins to gather; what is there already, or on its way, is not begun again
    take(ids)       what was gathered, waited for; None where it was not, or was given up

At most two windows' are held, the one that runs and the next one's. Gathering should not hold the interpreter's lock:
the engine launches kernels meanwhile, and a GPU waits for every launch.
Not here: what is gathered and how (pack_table, the model). Invariant: what `take` gives is what gathering these ids
gave, or its error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import numpy as np
import numpy.typing as npt
import torch

from lanes.affinity import keep_to

HELD = 2
FEW_TOKENS = 64  # whose rows are found faster than a thread wakes up

Ids = npt.NDArray[np.int64]
Gather = Callable[[Ids, Callable[[], bool]], torch.Tensor]  # of ids, asking now and then whether it was given up


@dataclass(frozen=True, slots=True)
class _Gathering:
    """One window's."""

    ids: Ids
    found: Future[torch.Tensor]
    given_up: Event

    def give_up(self) -> None:
        self.given_up.set()
        self.found.cancel()


class Ahead:
    """One thread calls it, and one of its own gathers; a gathering that was given up raises CancelledError."""

    def __init__(self, gather: Gather, name: str) -> None:
        self._gather, self._name = gather, name
        self._gatherings: list[_Gathering] = []
        # The process may later be told to keep to the engine's core, which this is meant to leave alone.
        cores = sorted(os.sched_getaffinity(0))
        self._cores = set(cores[1:] or cores)
        self._thread: ThreadPoolExecutor | None = None

    def ahead(self, ids: Ids) -> None:
        """Begins to gather what `ids` [N] name; never waits."""
        if any(np.array_equal(gathering.ids, ids) for gathering in self._gatherings):
            return
        while len(self._gatherings) >= HELD:
            self._gatherings.pop(0).give_up()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name, keep_to, (self._cores,))
        given_up = Event()
        found = self._thread.submit(self._gather, ids, given_up.is_set)
        self._gatherings.append(_Gathering(ids, found, given_up))

    def take(self, ids: Ids) -> torch.Tensor | None:
        """What was gathered; raises what gathering raised."""
        for number, gathering in enumerate(self._gatherings):
            if np.array_equal(gathering.ids, ids):
                del self._gatherings[number]
                with contextlib.suppress(CancelledError):
                    return gathering.found.result()
        return None

    def forget(self) -> None:
        """Nobody will take what is gathered."""
        while self._gatherings:
            self._gatherings.pop().give_up()
