"""What the cache policy is compared with: recency, frequency, both, a fixed set, and a bound that knows the future.

All but the bound are policies as a lane could run them; it is not. Not here: traces, figures (cache_policy).
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


HALF_LIFE = 128  # windows, as the lanes' policy has it
SAMPLE_WINDOWS = 256  # after which TinyLFU halves its counts


def least_frequently_used(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """Uses that count half after HALF_LIFE windows; a missed key with more than the least used gets its slot."""
    windows = state.windows + 1
    uses = state.uses * 2.0 ** (-1 / HALF_LIFE)
    uses[touched.keys] += 1
    held = np.flatnonzero(state.resident)
    victims = held[np.argsort(uses[held], kind="stable")[: budget.swaps]]
    return _admitted(replace(state, windows=windows, uses=uses), touched, budget, victims)


def tiny_lfu(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """Least recently used decides who would go, frequency whether: counts are halved every SAMPLE_WINDOWS (exact
    counts in place of a sketch, which 24,576 keys do not need)."""
    windows = state.windows + 1
    uses = state.uses * 0.5 if windows % SAMPLE_WINDOWS == 0 else state.uses.copy()
    uses[touched.keys] += 1
    last_used = state.last_used.copy()
    last_used[touched.keys] = windows
    held = np.flatnonzero(state.resident)
    victims = held[np.argsort(last_used[held], kind="stable")[: budget.swaps]]
    return _admitted(replace(state, windows=windows, uses=uses, last_used=last_used), touched, budget, victims)


def _admitted(state: State, touched: Touched, budget: Budget, victims: Ints) -> tuple[State, Plan]:
    """The most used missed keys against free slots, then against `victims` in their order, each if it has more uses."""
    missed = touched.keys[~state.resident[touched.keys]]
    wanted = missed[np.argsort(-state.uses[missed], kind="stable")[: budget.swaps]]
    free = min(wanted.shape[0], max(0, budget.slots - int(np.count_nonzero(state.resident))))
    rivals = wanted[free : free + victims.shape[0]]
    victims = victims[: rivals.shape[0]]
    wins = state.uses[rivals] > state.uses[victims]
    plan = Plan(evict=victims[wins], admit=np.concatenate((wanted[:free], rivals[wins])))
    resident = state.resident.copy()
    resident[plan.evict] = False
    resident[plan.admit] = True
    return replace(state, resident=resident), plan


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
