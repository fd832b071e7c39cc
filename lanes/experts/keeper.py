"""Keeps a lane's profile of hot experts up to date on disk: a thread that writes what the cache's policy knows.

A policy's state is a value that is never changed in place, so this thread may look at the one that stands while windows
run. Not here: the file (profile), what is known (adaptive).
"""

from __future__ import annotations

import threading
from pathlib import Path

from lanes import limits
from lanes.experts.adaptive import begun, remembered
from lanes.experts.cache import ExpertCache
from lanes.experts.profile import PackExperts, read, write


class ProfileKeeper:
    """Gives the cache what the lane's pack has in `folder`; from `start` on it writes, and `close` writes once more."""

    def __init__(
        self, folder: Path, lane: str, of: PackExperts, cache: ExpertCache, every_s: float = limits.PROFILE_EVERY_S
    ) -> None:
        """Before the first window of `cache`, whose policy is `adaptive`."""
        self._folder, self._lane, self._of, self._cache, self._every_s = folder, lane, of, cache, every_s
        values = read(folder, of)
        if values is not None and cache.room:
            cache.begin(begun(values, cache.room))
        self._closed = threading.Event()
        self._written = 0  # windows that need not be written
        self._thread = threading.Thread(target=self._run, name="expert-profile", daemon=True)

    def start(self) -> None:
        """Windows from here on are worth telling."""
        self._written = self._cache.state.windows
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(self._every_s)
            state = self._cache.state
            if state.windows != self._written:
                write(self._folder, self._lane, self._of, remembered(state))
                self._written = state.windows
