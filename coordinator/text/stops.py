"""Stop strings in a stream of text: what may be shown, and where the text ends.

Not here: tokens, bytes. Invariants, whatever the pieces the text comes in: what is emitted is the text up to the stop
that is complete first (of several complete at the same character, the longest), and never a part of it; without a stop
everything is emitted by `flush`; never more than the longest stop is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Holds back what may still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stop: str | None = None  # the one that ended the text

    @property
    def stopped(self) -> bool:
        """Whether a stop was complete."""
        return self.stop is not None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown now. Once `stopped`, nothing more. Without `may_stop`, no stop ends with this text."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        buffer = self._held + text
        found = self._first_stop(buffer, len(self._held)) if may_stop else None
        if found is not None:
            begin, self.stop = found
            self._held = ""
            return buffer[:begin]
        keep = self._unfinished(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str, old: int) -> tuple[int, str] | None:
        """Where the stop begins that is complete first, and which; one inside the `old` characters was allowed."""
        best: tuple[int, int, str] | None = None  # (end, begin, stop)
        for stop in self._stops:
            begin = buffer.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0:
                found = (begin + len(stop), begin, stop)
                best = found if best is None else min(best, found)
        return None if best is None else best[1:]

    def _unfinished(self, buffer: str) -> int:
        """Where the longest tail begins that is the beginning of a stop."""
        for begin in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[begin:]
            if any(stop.startswith(tail) for stop in self._stops):
                return begin
        return len(buffer)
