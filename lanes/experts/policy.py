"""Which experts a lane keeps: a pure function from (state, what the finished window touched, budget) to a plan.

Not here: bytes, addresses, clocks or randomness; the cache carries plans out, the engine says when (between windows).
Keys: layer * experts + expert. A policy is any `(State, Touched, Budget) -> (State, Plan)`.

Invariant: after a plan at most `budget.slots` keys are resident, what is evicted was resident, what is admitted was
not, and nothing that the window touched is evicted for something else that it touched.

Letters: N keys of the model, D distinct keys of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Touched:
    """The distinct keys of a finished window, ascending, and how many rows were routed to each."""

    keys: Ints  # [D]
    rows: Ints  # [D]


@dataclass(frozen=True, slots=True)
class Budget:
    """Room for `slots` records; at most `swaps` of them are copied between two windows."""

    slots: int
    swaps: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Keys to drop and keys to copy in; dropping comes first."""

    evict: Ints
    admit: Ints


@dataclass(frozen=True, slots=True)
class State:
    """What a policy remembers; never changed in place."""

    windows: int
    last_used: Ints  # [N] number of the window that touched the key last, 0 for never
    resident: npt.NDArray[np.bool_]  # [N]

    @classmethod
    def empty(cls, keys: int) -> State:
        """Nothing seen, nothing resident."""
        return cls(0, np.zeros(keys, np.int64), np.zeros(keys, np.bool_))


Policy = Callable[[State, Touched, Budget], tuple[State, Plan]]


def least_recently_used(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """Admits what the window missed, most rows first, over what was unused for longest, lowest key first."""
    windows = state.windows + 1
    last_used = state.last_used.copy()
    last_used[touched.keys] = windows

    missed = ~state.resident[touched.keys]
    wanted, rows = touched.keys[missed], touched.rows[missed]
    # With equal rows (any decode window) and few swaps the first layers would always win: start elsewhere each time.
    turn = windows * budget.swaps % max(1, wanted.shape[0])
    wanted, rows = np.roll(wanted, -turn), np.roll(rows, -turn)
    wanted = wanted[np.argsort(-rows, kind="stable")]

    held = np.flatnonzero(state.resident)
    idle = held[last_used[held] < windows]
    idle = idle[np.argsort(last_used[idle], kind="stable")]
    free = budget.slots - held.shape[0]
    count = max(0, min(wanted.shape[0], budget.swaps, free + idle.shape[0]))
    plan = Plan(evict=idle[: max(0, count - free)], admit=wanted[:count])

    resident = state.resident.copy()
    resident[plan.evict] = False
    resident[plan.admit] = True
    return State(windows, last_used, resident), plan
