"""What a policy is: a pure function from (state, what the finished window touched, budget) to (state, plan).

Not here: a policy (adaptive), bytes, addresses, clocks or randomness; the cache carries plans out, the engine says when
(between windows). Keys: layer * experts + expert.

Invariant of every policy: with an unchanging budget at most `budget.slots` keys are resident after a plan and at most
`budget.swaps` are admitted by one; what is evicted was resident, what is admitted was not and was touched by the
window; the state that came in is not changed.

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
    """The distinct keys of a finished window, ascending, how many rows were routed to each, and how many it had."""

    keys: Ints  # [D]
    rows: Ints  # [D], each from 1 to window_rows
    window_rows: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Room for `slots` records; at most `swaps` of them are copied between two windows, each as costly as so many
    misses."""

    slots: int
    swaps: int
    copy_misses: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Keys to drop and keys to copy in; dropping comes first."""

    evict: Ints
    admit: Ints


@dataclass(frozen=True, slots=True)
class State:
    """What a policy remembers; never changed in place. What uses mean is the policy's own affair."""

    windows: int
    last_used: npt.NDArray[np.int32]  # [N] number of the window that used the key last, 0 for never
    uses: npt.NDArray[np.float64]  # [N]
    resident: npt.NDArray[np.bool_]  # [N]
    long_uses: npt.NDArray[np.float64]  # [N]

    @classmethod
    def empty(cls, keys: int) -> State:
        """Nothing seen, nothing resident."""
        last_used, resident = np.zeros(keys, np.int32), np.zeros(keys, np.bool_)
        return cls(0, last_used, np.zeros(keys), resident, np.zeros(keys))


Policy = Callable[[State, Touched, Budget], tuple[State, Plan]]
