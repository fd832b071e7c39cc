"""What the cache policy is compared with: least recently used, a fixed set, and a bound that knows the future.

The first two are policies as a lane could run them; the bound is not. Not here: traces, figures (cache_policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lanes.experts.policy import Budget, Ints, Plan, Policy, State, Touched


def least_recently_used(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """Admits what the window missed, most rows first, over what was unused for longest, lowest key first.

    Nothing that the window touched is evicted for something else that it touched.
    """
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
    return replace(state, windows=windows, last_used=last_used, resident=resident), plan


def fixed(profile: Ints) -> Policy:
    """Keeps the keys that `profile` ([N], uses of every key) counts highest, whatever comes: no copies later."""

    def policy(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        none = np.empty(0, np.int64)
        if state.windows:
            return replace(state, windows=state.windows + 1), Plan(none, none)
        resident = np.zeros_like(state.resident)
        resident[np.argsort(-profile, kind="stable")[: budget.slots]] = True
        return replace(state, windows=1, resident=resident), Plan(none, np.flatnonzero(resident))

    return policy


def clairvoyant_hits(windows: Sequence[Touched], keys: int, slots: int) -> npt.NDArray[np.int64]:
    """Resident keys that each window touches when between windows any touched key may be kept or dropped, copies are
    free, and what is needed soonest stays (Belady, with bypass): no policy has more in total."""  # fmt: skip
    never = len(windows)
    next_use = np.full(keys, never, np.int64)
    following: list[Ints] = []  # for each window, the next use of each of its keys
    for number in range(len(windows) - 1, -1, -1):
        touched = windows[number].keys
        following.append(next_use[touched])
        next_use[touched] = number
    following.reverse()
    resident = np.zeros(keys, np.bool_)
    hits = np.zeros(len(windows), np.int64)
    for number, (window, after) in enumerate(zip(windows, following, strict=True)):
        hits[number] = np.count_nonzero(resident[window.keys])
        next_use[window.keys] = after
        resident[window.keys] = True
        held = np.flatnonzero(resident)
        if held.shape[0] > slots:
            resident[held[np.argpartition(next_use[held], slots)[slots:]]] = False
    return hits
