"""Which cores each lane of a host has, and which are left to the doors: a pure rule.

A GPU lane's threads spin on their cores while it works, so whoever wakes up there takes a core from a layer: of a large
host one core or two are no lane's, and the coordinator keeps to those. A CPU lane sleeps between its calls, and
shares: its lanes have all cores, and nobody else is bound.

Not here: what a lane does with its cores (lanes.config: the first one is its engine's), counting them.
Invariant: as long as there are enough cores, no two lanes have one in common, nor has a lane one of the doors'; one
core more never gives a lane fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.errors import BadOption

SPARE_FROM = (8, 24)  # cores of a host with GPU lanes, from which on one of them, then another, is no lane's


@dataclass(frozen=True, slots=True)
class Layout:
    """Cores by number, in the order in which they were dealt out."""

    lanes: tuple[tuple[int, ...], ...]
    doors: tuple[int, ...]  # the coordinator's; empty: any

    def told(self) -> dict[str, str]:
        """For people, by process."""
        named = {f"lane-{number}": ranges(own) for number, own in enumerate(self.lanes)}
        return {**named, "doors": ranges(self.doors) if self.doors else "any"}


def cores_of_a_lane(cores: int, lanes: int, *, gpu: bool) -> int:
    """How many of the host's each lane has where nobody says; 0: they have to share."""
    return (cores - spare(cores, gpu=gpu)) // lanes


def spare(cores: int, *, gpu: bool) -> int:
    """How many of the host's are no lane's, at least."""
    return sum(cores >= least for least in SPARE_FROM) if gpu else 0


def layout(allowed: Sequence[int], lanes: int, per_lane: int | None = None, *, gpu: bool) -> Layout:
    """Equal, disjoint runs of `allowed`, whose neighbours are near each other; with more lanes than cores, lanes share,
    spread evenly.

    Raises BadOption where `per_lane` cores are too many.
    """
    count = len(allowed)
    share = per_lane or max(1, cores_of_a_lane(count, lanes, gpu=gpu))
    if share > count:
        raise BadOption(f"{share} cores per lane, but only {count} are allowed here")
    if per_lane is not None and share * lanes > count:
        raise BadOption(f"{lanes} lanes × {share} cores, but only {count} are allowed here")
    each = tuple(tuple(allowed[(lane * share + k) % count] for k in range(share)) for lane in range(lanes))
    return Layout(each, tuple(allowed[lanes * share :]) if gpu else ())


def ranges(cores: Iterable[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
