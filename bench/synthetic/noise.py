"""Random numbers by name and place, the same bytes on every machine: integers of a counter-based generator.

A matrix is drawn in runs of rows, each from a stream of its own, so threads may take them in any order. Values are
uniform: only sizes matter here, and a uniform 16-bit number becomes a bf16 or fp32 one by operations that every
processor rounds alike. Not here: what the numbers are for.

Invariant: `rows(name, first, ...)` depends on seed, name and place only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RUN_VALUES = 1 << 20  # of one stream: 2 MiB, which stay in a core's cache
UNIT = 1 / (32768 / math.sqrt(3))  # a uniform int16 times this has a root mean square of 1

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Noise:
    """The numbers of one seed."""

    seed: int

    def words(self, name: str, number: int, count: int) -> npt.NDArray[np.uint64]:
        """`count` words of stream `number` of a name."""
        key = [self.seed << 32 | zlib.crc32(name.encode()), number]
        return np.random.Philox(key=np.array(key, np.uint64)).random_raw(count)

    def unit(self, name: str, number: int, count: int) -> Floats:
        """Uniform numbers of mean 0 and mean square 1."""
        codes = self.words(name, number, -(-count // 4)).view(np.int16)[:count]
        values: Floats = codes.astype(np.float32)
        values *= np.float32(UNIT)
        return values

    def bell(self, name: str, shape: tuple[int, int]) -> Floats:
        """Integers, as floats, that are about normal: sums of four codes. Divided by BELL their mean square is 1."""
        codes = self.words(name, 0, shape[0] * shape[1]).view(np.int16).reshape(*shape, 4)
        sums: Floats = codes.astype(np.int32).sum(axis=-1).astype(np.float32)
        return sums


BELL = 2 / UNIT


def runs(rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """(number, first row, end row) of the runs of a matrix."""
    step = max(1, RUN_VALUES // columns)
    for number, first in enumerate(range(0, rows, step)):
        yield number, first, min(rows, first + step)
