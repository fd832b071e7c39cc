"""Which missing experts of a layer the CPU takes and which are left to the link: pure.

Of a layer's distinct missing experts, ascending, the CPU takes the first `cpu_of_misses[count]`; the GPU reads the
others over the link. Its twin: `assign` of lanes.kernels.jobs; the CPU is told (`marked`). Not here: measured rates,
the search for a better table.

Letters: R rows, K experts per row, P = R * K pairs, E experts of a layer, J experts the CPU takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Split:
    """The CPU's experts of one layer, and where the GPU finds their rows."""

    taken: I32  # [J] ids, ascending
    offsets: I32  # [J + 1] into pair_rows
    pair_rows: I32  # [rows the CPU computes] the window's row of each, by (expert, row)
    slots: I32  # [P] each pair's place among those rows, -1 where the GPU computes it


def split(ids: I32, resident: npt.NDArray[np.bool_], cpu_of_misses: I32) -> Split:
    """ids [R, K], ascending in a row; resident [E]; cpu_of_misses [P + 1]."""
    misses = sorted({int(e) for e in ids.reshape(-1) if not resident[e]})
    taken = misses[: max(0, int(cpu_of_misses[len(misses)]))]
    slots = np.full(ids.shape, -1, np.int32)
    offsets, pair_rows = [0], list[int]()
    for expert in taken:
        for row, k in zip(*np.nonzero(ids == expert), strict=True):
            slots[row, k] = len(pair_rows)
            pair_rows.append(int(row))
        offsets.append(len(pair_rows))
    return Split(
        np.array(taken, np.int32), np.array(offsets, np.int32), np.array(pair_rows, np.int32), slots.reshape(-1)
    )


def marked(ids: I32, slots: I32) -> I32:
    """ids [R, K] as the CPU is told them: those that are not its own as their complement."""
    told: I32 = np.where(slots.reshape(ids.shape) >= 0, ids, ~ids)
    return told


def cpu_share_table(most: int, link_us: float, cpu_us: float, cpu_start_us: float) -> I32:
    """How many of 0..most misses the CPU takes so that the later of the two is done soonest; int32 [most + 1].

    link_us and cpu_us: time of one expert on either side while both work; cpu_start_us: what a share costs the CPU
    before its first expert. Where two counts are equally good the CPU takes fewer.
    """
    misses = np.arange(most + 1)
    taken = np.arange(most + 1)[:, None]
    cpu = np.where(taken > 0, cpu_start_us + taken * cpu_us, 0.0)
    longest = np.maximum(cpu, (misses - taken) * link_us)  # [taken, misses]
    longest[taken > misses] = np.inf
    table: I32 = longest.argmin(axis=0).astype(np.int32)
    return table
