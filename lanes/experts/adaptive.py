"""The lane's cache policy: decayed uses with recency, and an admission that must pay for its copy.

A key's *value* is the number of windows that used it, each counted half after HALF_LIFE more windows: about the number
of uses to expect while it is remembered. Two rules act on it:

- Admission. A copy costs as much link time as one miss. A key the window missed takes a victim's slot only when its
  value is at least MARGIN above the victim's, and an empty slot only when its value is at least FLOOR.
- Recency. A resident key that should have been used several times since it last was, and was not, belongs to a topic
  that has ended: its value as a victim is divided by 1 + (uses that failed to come / PATIENCE)^2.

A prompt chunk touches nearly every expert. It counts as PROMPT_USES decode windows whatever its length: each key gets
the share of the chunk's rows that chose it, times PROMPT_USES.

Decay costs nothing per window: uses are summed in a unit that doubles every HALF_LIFE windows instead of halving all
the sums (`State.uses` is in that unit; after RESCALE half-lives it starts again). So a window costs a few operations on
its D keys and one partial selection over the S residents.

Not here: what a policy is (policy). How the constants were chosen: docs/expert-cache.md.

Letters: N keys of the model, D distinct keys of a window, M of them missed, S slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanes.experts.policy import Budget, Ints, Plan, State, Touched

HALF_LIFE = 128  # windows
MARGIN = 2.0  # uses
FLOOR = 1.0  # uses
PATIENCE = 3.0  # uses
PROMPT_USES = 16  # windows of more rows count as this many uses, spread over what their rows chose
RESCALE = 512  # half-lives; 2.0 ** RESCALE is far below the largest double

_PER_WINDOW = 1 - 2.0 ** (-1 / HALF_LIFE)  # value times this: uses per window


def adaptive(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """A `Policy`."""
    windows, keys = state.windows + 1, touched.keys
    last_used, uses = state.last_used.copy(), state.uses.copy()
    unit = _unit(windows)
    if unit == 1.0:
        uses *= 2.0**-RESCALE
    if touched.window_rows <= PROMPT_USES:
        uses[keys] += unit
        last_used[keys] = windows
    else:
        weight = touched.rows * (PROMPT_USES / touched.window_rows)
        uses[keys] += weight * unit
        last_used[keys[weight >= 1]] = windows

    plan = _plan(state.resident, windows, last_used, uses, unit, keys, budget)
    resident = state.resident
    if plan.admit.shape[0] or plan.evict.shape[0]:
        resident = resident.copy()
        resident[plan.evict] = False
        resident[plan.admit] = True
    return State(windows, last_used, uses, resident), plan


def remembered(state: State) -> npt.NDArray[np.float64]:
    """What the state says of every key: its value, [N]."""
    return state.uses / _unit(state.windows)


def begun(values: npt.NDArray[np.floating], slots: int) -> State:
    """The state of a lane that was told such values, [N]: the keys that are worth a slot and first among them reside.

    What was true at another time counts half.
    """
    state = State.empty(values.shape[0])
    halved = values.astype(np.float64) / 2
    best = _smallest(-halved, slots)
    state.resident[best[halved[best] >= FLOOR]] = True
    return State(0, state.last_used, halved, state.resident)


def _unit(windows: int) -> float:
    """What one use counts in this window: from 1.0 up to 2.0 ** RESCALE, then from 1.0 again."""
    return float(2.0 ** (windows % (RESCALE * HALF_LIFE) / HALF_LIFE))


def _plan(
    resident: npt.NDArray[np.bool_], windows: int, last_used: npt.NDArray[np.int32], uses: npt.NDArray[np.float64],
    unit: float, keys: Ints, budget: Budget,
) -> Plan:  # fmt: skip
    wanted = keys[~resident[keys]]  # [M]
    value = uses[wanted] / unit
    worth = value >= FLOOR
    wanted, value = wanted[worth], value[worth]
    best = _smallest(-value, budget.swaps)
    wanted, value = wanted[best], value[best]

    free = max(0, budget.slots - int(np.count_nonzero(resident)))
    count = wanted.shape[0]
    if count <= free:
        return Plan(evict=wanted[:0], admit=wanted)
    held = np.flatnonzero(resident)  # [S]
    kept = uses[held] / unit
    missed_uses = (windows - last_used[held]) * kept * _PER_WINDOW / PATIENCE
    kept /= 1 + missed_uses * missed_uses
    least = _smallest(kept, count - free)
    # Candidates fall and victims rise: those that pay are a prefix.
    paying = int(np.count_nonzero(value[free : free + least.shape[0]] - kept[least] >= MARGIN))
    return Plan(evict=held[least[:paying]], admit=wanted[: free + paying])


def _smallest(values: npt.NDArray[np.float64], count: int) -> Ints:
    """Indices of the `count` smallest, ascending by (value, index)."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= values.shape[0]:
        return np.argsort(values, kind="stable")
    limit = np.partition(values, count - 1)[count - 1]
    candidates = np.flatnonzero(values <= limit)
    return candidates[np.argsort(values[candidates], kind="stable")[:count]]
