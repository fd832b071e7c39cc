"""Whether a process that should answer has been silent for too long. Pure.

Invariant: time in which nobody looked (the watcher itself slept) says nothing about the watched.
"""

from __future__ import annotations

from coordinator import limits


class Vigil:
    """Over one life of a process, by default of the coordinator."""

    def __init__(
        self,
        now: float,
        *,
        first_s: float = limits.COORDINATOR_START_S,
        then_s: float = limits.COORDINATOR_SILENT_S,
        pause_s: float = limits.PING_S + limits.PING_TIMEOUT_S,
    ) -> None:
        """`first_s`: until its first answer; `then_s`: between two; `pause_s`: between two looks of whoever watches."""
        self._since = self._looked = now
        self._heard = False
        self._first_s, self._then_s, self._pause_s = first_s, then_s, pause_s

    def answered(self, now: float) -> None:
        """It did."""
        self._since = self._looked = now
        self._heard = True

    def overdue(self, now: float) -> bool:
        """It did not, once more; whether that is enough."""
        slept_s = now - self._looked - self._pause_s
        if slept_s > limits.OWN_STALL_S:
            self._since += slept_s
        self._looked = now
        return now - self._since >= (self._then_s if self._heard else self._first_s)
