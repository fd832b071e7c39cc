"""Whose step is next while one generation visits another whose prompt is being read. Pure: no clock.

    visitor alone ──its time is over──▶ both, by turns, each as long as the other

Not here: who may visit (the coordinator), what a step is (steps). Invariant: past its time alone, a visitor has had at
most one step's time more than the generation that it interrupted: a visit that turns out long starves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    """One visit."""

    alone_ns: int  # of the visitor's time at the beginning
    _visitor_ns: int = 0
    _host_ns: int = 0

    def visitors(self) -> bool:
        """Whether the next step is the visitor's."""
        return self._visitor_ns < self.alone_ns or self._visitor_ns - self.alone_ns <= self._host_ns

    def took(self, step_ns: int, *, visitor: bool) -> None:
        """A step has ended."""
        if visitor:
            self._visitor_ns += step_ns
        else:
            self._host_ns += step_ns
