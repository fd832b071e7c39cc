"""How the next rows of a prompt are read on a GPU: by decode windows, or in one pass. Pure: numbers in, choice out.

    windows   of 4 rows: launches cost nothing and the CPU takes its share, but windows fetch their experts one by one
    chosen    one pass; the link brings what a layer's rows chose, once that is known
    ahead     one pass; under a layer's attention the link brings what comes next, chosen or not (lanes.experts.feed)

The two passes compute the same and differ in what they copy, so that choice is made for every window anew. Windows
differ from a pass in last bits: up to how many rows they are taken is settled once, at the start, and counted in whole
windows. So a lane reads a prompt always alike, and lanes of one kind do but where their measurements fall on either
side of such a step. A CPU lane has no choice: it reads every record in place, once a window.

Not here: measuring (lanes.pace), uses of experts (lanes.experts.demand).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lanes import limits
from lanes.experts.ring import STEP_RECORDS

WINDOW_ROWS = limits.MAX_WINDOW_TOKENS
MOST_WINDOWS = 16  # that a part of a prompt is ever read by
_ORDER = ("chosen", "ahead", "windows")  # of equally good ones the first


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured at the start."""

    link_bytes_per_s: float  # of copies
    miss_s: float  # of an expert that a decode window misses, link and CPU at once
    window_s: float  # of a decode window of 4 rows that misses none
    pass_s: float  # of a pass of a few rows that waits for no copy
    dense_row_s: float  # more for each row, experts aside
    expert_row_s: float  # more for each row's experts


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of the model and the ring."""

    layers: int
    record_bytes: int
    ring_slots: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What so many rows will ask of all layers, in records."""

    rows: int
    missed: float  # distinct experts that a pass chooses and the cache lacks
    missed_by_windows: float  # the same of each decode window, added up
    absent: float  # that the cache lacks, chosen or not


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one way."""

    seconds: float
    link_bytes: float  # that cross the link, or are computed by the CPU in their place


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest way, and what every way would cost."""

    way: str
    costs: dict[str, Cost]

    @property
    def reason(self) -> str:
        """For the log."""
        said = (
            f"{way} {cost.seconds * 1e3:.1f} ms, {cost.link_bytes / 1e9:.2f} GB" for way, cost in self.costs.items()
        )
        return "; ".join(said)


def costs(asked: Asked, room: Room, pace: Pace) -> dict[str, Cost]:
    """Of every way."""
    layers, record_s = room.layers, room.record_bytes / pace.link_bytes_per_s
    dense_s, expert_s = pace.pass_s + asked.rows * pace.dense_row_s, asked.rows * pace.expert_row_s
    windows_s = -(-asked.rows // WINDOW_ROWS) * pace.window_s + asked.missed_by_windows * pace.miss_s
    # The products of a layer cannot begin before its first step's copies are there, which nothing hides.
    step_s = min(STEP_RECORDS, room.ring_slots // 2, asked.missed / layers) * record_s
    chosen_s = dense_s + max(asked.missed * record_s, layers * step_s + expert_s)
    # Of a layer: as many records as the ring holds begin before its routing is known; some of them are chosen.
    begun = min(room.ring_slots, asked.absent / layers)
    used = begun * asked.missed / asked.absent if asked.absent else 0.0
    crossing = asked.missed / layers + begun - used
    hidden_s = min(begun * record_s, dense_s / layers)
    ahead_s = dense_s + layers * max(crossing * record_s - hidden_s, expert_s / layers)
    size = room.record_bytes
    return {
        "chosen": Cost(chosen_s, asked.missed * size),
        "ahead": Cost(ahead_s, crossing * layers * size),
        "windows": Cost(windows_s, asked.missed_by_windows * size),
    }


def cheapest(asked: Asked, room: Room, pace: Pace, ways: tuple[str, ...] = _ORDER) -> Choice:
    """The way of least seconds among `ways`."""
    found = {way: cost for way, cost in costs(asked, room, pace).items() if way in ways}
    return Choice(min(found, key=lambda way: found[way].seconds), found)


def windows_up_to(ask: Callable[[int], Asked], room: Room, pace: Pace) -> tuple[int, Choice]:
    """(rows, the choice one window further): parts of a prompt of at most so many rows are read by decode windows."""
    rows = 0
    while True:
        choice = cheapest(ask(rows + WINDOW_ROWS), room, pace)
        if choice.way != "windows" or rows == MOST_WINDOWS * WINDOW_ROWS:
            return rows, choice
        rows += WINDOW_ROWS


class Preludes:
    """How long layers took before their experts could begin, by the rows of a pass."""

    NEAR = 2  # doublings: of other numbers of rows nothing is concluded

    def __init__(self) -> None:
        self._row_s: dict[int, float] = {}  # by doublings of rows, the last pass's

    def told(self, rows: int, seconds: float) -> None:
        """Of a layer of a pass."""
        self._row_s[rows.bit_length()] = seconds / rows

    def of(self, rows: int) -> float | None:
        """Seconds for so many rows, from the nearest that were measured; None where none is near."""
        doublings = rows.bit_length()
        near = min(self._row_s, key=lambda other: (abs(other - doublings), other), default=None)
        return None if near is None or abs(near - doublings) > self.NEAR else self._row_s[near] * rows


def ring_slots(rows: int, layers: int, record_bytes: int, pace: Pace, prelude_s: float | None = None) -> int:
    """That the link fills under the attention of a layer of so many rows, and two steps; within the limits. What was
    measured of such a pass counts more than the pace."""
    dense_s = prelude_s if prelude_s is not None else (pace.pass_s + rows * pace.dense_row_s) / layers
    filled = math.ceil(dense_s * pace.link_bytes_per_s / record_bytes)
    return max(limits.RING_SLOTS, min(limits.MAX_RING_SLOTS, filled + 2 * STEP_RECORDS))
