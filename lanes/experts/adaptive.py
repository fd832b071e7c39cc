"""The lane's cache policy: decayed uses with recency, and an admission that must pay for its copy.

A key's *value* is about the number of uses to expect in a spell of SPELL windows: the mean of how often it was used
lately (uses count half after SHORT more windows) and of late (after LONG). Two rules act on it:

- Admission. A copy costs as much as `budget.copy_misses` misses. A key the window missed takes a victim's slot only
  when its value is at least MARGIN + copy_misses above the victim's, and an empty slot only when it is at least FLOOR.
- Recency. A resident key that should have been used several times since it last was, and was not, belongs to a topic
  that has ended: its value as a victim is divided by 1 + (uses that failed to come / patience)^2. The dearer a copy,
  the more patience: PATIENCE * (1 + copy_misses).

A prompt chunk touches nearly every expert. It counts as PROMPT_USES decode windows whatever its length: each key gets
the share of the chunk's rows that chose it, times PROMPT_USES.

Decay costs nothing per window: uses are summed in a unit that doubles every half-life instead of halving all the sums
(`State.uses` and `State.long_uses` are in the units of SHORT and LONG; after RESCALE half-lives a unit starts again).
So a window costs a few operations on its D keys and one partial selection over the S residents.

Not here: what a policy is (policy). How the constants were chosen: docs/expert-cache.md.

Letters: N keys of the model, D distinct keys of a window, M of them missed, S slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lanes.experts.policy import Budget, Ints, Plan, State, Touched

SHORT, LONG = 64, 1024  # windows: half-lives
MARGIN = 1.0  # uses, beside the copy's own price
FLOOR = 1.0  # uses
PATIENCE = 1.5  # uses
PROMPT_USES = 16  # windows of more rows count as this many uses, spread over what their rows chose
RESCALE = 512  # half-lives; 2.0 ** RESCALE is far below the largest double


def _remembered_share(half_life: int) -> float:
    """Sums of uses that count half after so long, times this: uses a window."""
    return 1 - float(2.0 ** (-1 / half_life))


SPELL = 2 / _remembered_share(SHORT)  # windows: so many that half of them is what short sums stand for
_LONG_SHARE = _remembered_share(LONG) / _remembered_share(SHORT)  # and half this times the long sum


def adaptive(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
    """A `Policy`."""
    windows, keys = state.windows + 1, touched.keys
    last_used, uses, long_uses = state.last_used.copy(), state.uses.copy(), state.long_uses.copy()
    prompt = touched.window_rows > PROMPT_USES
    weight = touched.rows * (PROMPT_USES / touched.window_rows) if prompt else np.ones(keys.shape[0])
    for sums, half_life in ((uses, SHORT), (long_uses, LONG)):
        unit = _unit(windows, half_life)
        if unit == 1.0:
            sums *= 2.0**-RESCALE
        sums[keys] += weight * unit
    last_used[keys[weight >= 1]] = windows

    after = State(windows, last_used, uses, state.resident, long_uses)
    plan = _plan(after, keys, budget)
    if plan.admit.shape[0] or plan.evict.shape[0]:
        resident = state.resident.copy()
        resident[plan.evict] = False
        resident[plan.admit] = True
        after = replace(after, resident=resident)
    return after, plan


def remembered(state: State) -> npt.NDArray[np.float64]:
    """What the state says of every key: its value, [N]."""
    return _value(state, np.arange(state.uses.shape[0]))


def begun(values: npt.NDArray[np.floating], slots: int) -> State:
    """The state of a lane that was told such values, [N]: the keys that are worth a slot and first among them reside.

    What was true at another time counts half.
    """
    halved = values.astype(np.float64) / 2
    state = replace(State.empty(values.shape[0]), uses=halved / 2, long_uses=halved / 2 / _LONG_SHARE)
    best = _smallest(-halved, slots)
    state.resident[best[halved[best] >= FLOOR]] = True
    return state


def _unit(windows: int, half_life: int) -> float:
    """What one use counts in this window: from 1.0 up to 2.0 ** RESCALE, then from 1.0 again."""
    return float(2.0 ** (windows % (RESCALE * half_life) / half_life))


def _value(state: State, keys: Ints) -> npt.NDArray[np.float64]:
    """Of some keys."""
    found: npt.NDArray[np.float64] = state.uses[keys] / _unit(state.windows, SHORT)
    found += state.long_uses[keys] * (_LONG_SHARE / _unit(state.windows, LONG))
    return found


def _plan(state: State, keys: Ints, budget: Budget) -> Plan:
    """What the window's keys may replace."""
    wanted = keys[~state.resident[keys]]  # [M]
    value = _value(state, wanted)
    worth = value >= FLOOR
    wanted, value = wanted[worth], value[worth]
    best = _smallest(-value, budget.swaps)
    wanted, value = wanted[best], value[best]

    free = max(0, budget.slots - int(np.count_nonzero(state.resident)))
    count = wanted.shape[0]
    if count <= free:
        return Plan(evict=wanted[:0], admit=wanted)
    held = np.flatnonzero(state.resident)  # [S]
    kept = _value(state, held)
    missed_uses = (state.windows - state.last_used[held]) * kept / (SPELL * PATIENCE * (1 + budget.copy_misses))
    kept /= 1 + missed_uses * missed_uses
    least = _smallest(kept, count - free)
    # Candidates fall and victims rise: those that pay are a prefix.
    ahead = value[free : free + least.shape[0]] - kept[least]
    paying = int(np.count_nonzero(ahead >= MARGIN + budget.copy_misses))
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
