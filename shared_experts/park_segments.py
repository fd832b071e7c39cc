"""Which segments of the park pool are free, and which of them a part gets: neighbours where there are any. Pure.

    [ used | free 3 | used | free 7 | used ] [ never used ............ ]
             └── runs, ascending, never adjacent

A part's runs are what a lane's copies and digests are made of, and parts come and go in other sizes and orders: taken
as they were given back, a pool that is full comes to hold them in ever more pieces. Not here: whose they are
(park_index). Invariants: a segment is used, in one run, or never used; those never used are the last ones.
"""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections.abc import Sequence


class FreeSegments:
    """Of `segments`, none used yet."""

    def __init__(self, segments: int) -> None:
        self.segments = segments
        self.touched = 0  # segments below it were in use once
        self.free = 0  # of these
        self._firsts: list[int] = []  # of runs, ascending
        self._counts: dict[int, int] = {}  # by first
        self._sizes: list[tuple[int, int]] = []  # (count, first), ascending

    def take(self, count: int, fresh: int) -> tuple[int, ...] | None:
        """So many, of which `fresh` may never have been used; None where there are too few. The smallest run that has
        room for all, else as few as there can be."""
        unused = min(fresh, self.segments - self.touched)
        if self.free + unused < count:
            return None
        taken: list[int] = []
        while (left := count - len(taken)) and self._sizes:
            at = bisect_left(self._sizes, (left, 0))
            size, first = self._sizes[min(at, len(self._sizes) - 1)]
            self._out(first)
            used = min(size, left)
            taken += range(first, first + used)
            if used < size:
                self._in(first + used, size - used)
        taken += range(self.touched, self.touched + left)
        self.touched += left
        return tuple(taken)

    def give(self, numbers: Sequence[int]) -> None:
        """They are nobody's from now on."""
        begin = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                self._give(numbers[begin], end - begin)
                begin = end

    def forget_fresh(self) -> list[int]:
        """The last ones that were used once, as far as they are free: they never were."""
        if not self._firsts or self._firsts[-1] + self._counts[self._firsts[-1]] < self.touched:
            return []
        first = self._firsts[-1]
        self._out(first)
        given = list(range(self.touched - 1, first - 1, -1))
        self.touched = first
        return given

    def _give(self, first: int, count: int) -> None:
        at = bisect(self._firsts, first)
        if at < len(self._firsts) and self._firsts[at] == first + count:
            count += self._out(self._firsts[at])
        if at and sum(self._run(at - 1)) == first:
            before, its_count = self._run(at - 1)
            self._out(before)
            first, count = before, its_count + count
        self._in(first, count)

    def _run(self, at: int) -> tuple[int, int]:
        return self._firsts[at], self._counts[self._firsts[at]]

    def _in(self, first: int, count: int) -> None:
        insort(self._firsts, first)
        self._counts[first] = count
        insort(self._sizes, (count, first))
        self.free += count

    def _out(self, first: int) -> int:
        count = self._counts.pop(first)
        del self._firsts[bisect_left(self._firsts, first)]
        del self._sizes[bisect_left(self._sizes, (count, first))]
        self.free -= count
        return count

    def __contains__(self, number: int) -> bool:
        """Whether it is in a run."""
        at = bisect(self._firsts, number)
        return bool(at) and number < sum(self._run(at - 1))
