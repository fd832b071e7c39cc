"""A GPU in thought whose streams take their time: when a window ends, and how long the link was busy. Nothing sleeps.

The host gives work ahead of the device; work of one stream follows one another; a copy engine does what comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lanes.experts.slots import Took


@dataclass
class Landing:
    """Of copies; implements `lanes.experts.slots.Arrival`."""

    line: Timeline
    end_s: float

    def here(self) -> bool:
        return self.end_s <= self.line.host_s

    def join(self) -> None:
        self.line.stream_s = max(self.line.stream_s, self.end_s)

    def took(self) -> Took:
        return Took()


class Timeline:
    """Implements `lanes.experts.feed.Link`; a mark is the time at which the computing stream is past it."""

    def __init__(self, record_s: float) -> None:
        self.host_s = self.stream_s = self.engine_s = self.copied_s = self.computed_s = 0.0
        self._record_s = record_s

    def mark(self) -> float:
        return self.stream_s

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], after: float) -> Landing:
        took_s = len(copies) * self._record_s
        self.engine_s = max(self.engine_s, self.host_s, after) + took_s
        self.copied_s += took_s
        return Landing(self, self.engine_s)

    def work(self, host_s: float) -> None:
        """The host is busy."""
        self.host_s += host_s

    def compute(self, seconds: float) -> None:
        """A launch."""
        self.stream_s = max(self.stream_s, self.host_s) + seconds
        self.computed_s += seconds

    def upload(self) -> None:
        """A few bytes, copied on the computing stream: they stand behind what the engine has been given."""
        self.stream_s = max(self.stream_s, self.host_s, self.engine_s)

    def wait(self) -> None:
        """The host, for all that the stream has been given."""
        self.host_s = max(self.host_s, self.stream_s)
