"""Whether a process that should answer has been silent for too long. Pure.

Invariant: time in which nobody looked (the watcher itself slept) says nothing about the watched.
"""

from __future__ import annotations

from coordinator import limits


class Vigil:
    """Over one life of a process."""

    def __init__(self, now: float) -> None:
        self._since = self._looked = now
        self._heard = False

    def answered(self, now: float) -> None:
        """It did."""
        self._since = self._looked = now
        self._heard = True

    def overdue(self, now: float) -> bool:
        """It did not, once more; whether that is enough."""
        slept_s = now - self._looked - limits.PING_S - limits.PING_TIMEOUT_S
        if slept_s > limits.OWN_STALL_S:
            self._since += slept_s
        self._looked = now
        return now - self._since >= (limits.COORDINATOR_SILENT_S if self._heard else limits.COORDINATOR_START_S)
