"""The adaptive policy against a slow twin in plain Python, its invariants, and what each of its rules is for."""

import copy
import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traces.synthetic import trace
from lanes.experts import adaptive as module
from lanes.experts.adaptive import FLOOR, LONG, MARGIN, PATIENCE, PROMPT_USES, RESCALE, SHORT, adaptive
from lanes.experts.policy import Budget, State, Touched

N = 40


def touched(keys, rows=None, window_rows=1):
    ids = np.array(sorted(set(keys)), np.int64)
    return Touched(ids, np.ones_like(ids) if rows is None else np.array(rows, np.int64), window_rows)


class Twin:
    """The same rules as sentences: dictionaries, loops and full sorts."""

    def __init__(self, windows=0):
        self.windows, self.short, self.long, self.last, self.resident = windows, {}, {}, {}, set()

    def step(self, seen, budget):
        self.windows += 1
        units = [2.0 ** (self.windows % (RESCALE * half_life) / half_life) for half_life in (SHORT, LONG)]
        for sums, unit in zip((self.short, self.long), units, strict=True):
            if unit == 1.0:
                sums.update({key: uses * 2.0**-RESCALE for key, uses in sums.items()})
            for key, rows in zip(seen.keys.tolist(), seen.rows.tolist(), strict=True):
                many = seen.window_rows > PROMPT_USES
                weight = rows * (PROMPT_USES / seen.window_rows) if many else 1.0
                sums[key] = sums.get(key, 0.0) + weight * unit
                if weight >= 1:
                    self.last[key] = self.windows
        a_window = [1 - 2.0 ** (-1 / half_life) for half_life in (SHORT, LONG)]
        margin = MARGIN + budget.copy_misses

        def value(key):
            long = self.long.get(key, 0.0) * (a_window[1] / a_window[0] / units[1])
            return self.short.get(key, 0.0) / units[0] + long

        def as_victim(key):
            idle = self.windows - self.last.get(key, 0)
            missed = idle * value(key) / (2 / a_window[0] * PATIENCE * (1 + budget.copy_misses))
            return value(key) / (1 + missed * missed)

        wanted = [key for key in seen.keys.tolist() if key not in self.resident and value(key) >= FLOOR]
        wanted = sorted(wanted, key=lambda key: (-value(key), key))[: budget.swaps]
        victims = sorted(self.resident, key=lambda key: (as_victim(key), key))
        free = budget.slots - len(self.resident)
        evict, admit = [], []
        for key in wanted:
            if len(admit) < free:
                admit.append(key)
                continue
            victim = victims[len(evict)] if len(evict) < len(victims) else None
            if victim is None or value(key) - as_victim(victim) < margin:
                break
            evict.append(victim)
            admit.append(key)
        self.resident = (self.resident - set(evict)) | set(admit)
        return evict, admit


def same_plans(history, budget, keys=N, windows=0):
    """Runs both over a history; returns all admissions."""
    twin, admitted = Twin(windows), []
    state = replace(State.empty(keys), windows=windows)
    for seen in history:
        evict, admit = twin.step(seen, budget)
        state, plan = adaptive(state, seen, budget)
        assert (plan.evict.tolist(), plan.admit.tolist()) == (evict, admit)
        assert set(np.flatnonzero(state.resident).tolist()) == twin.resident
        admitted += admit
    return admitted


WINDOWS = st.lists(
    st.tuples(st.dictionaries(st.integers(0, N - 1), st.integers(1, 300)), st.sampled_from([1, 4, 16, 17, 300])),
    max_size=40,
)


def history_of(drawn):
    for rows, size in drawn:
        keys = sorted(rows)
        yield touched(keys, [min(rows[key], size) for key in keys], size)


@settings(max_examples=300)
@given(WINDOWS, st.integers(0, N), st.integers(0, 6), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_equal_to_the_twin(drawn, slots, swaps, copy_misses):
    same_plans(history_of(drawn), Budget(slots, swaps, copy_misses))


@settings(max_examples=60)
@given(WINDOWS, st.integers(1, 8), st.sampled_from([SHORT, LONG]))
def test_equal_to_the_twin_where_a_unit_starts_again(drawn, slots, half_life):
    same_plans(history_of(drawn), Budget(slots, 4), windows=RESCALE * half_life - 7)


def test_equal_to_the_twin_on_skewed_windows_with_many_swaps():
    rng = np.random.default_rng(0)
    topics = [rng.permutation(400) for _ in range(4)]
    history = []
    for number in range(600):
        weights = 1 / (1 + topics[number // 150])
        history.append(touched(rng.choice(400, 30, replace=False, p=weights / weights.sum()).tolist()))
    assert len(same_plans(history, Budget(60, 8), keys=400)) > 100


@settings(max_examples=100)
@given(WINDOWS, st.integers(0, N), st.integers(0, 6))
def test_invariants_of_every_policy(drawn, slots, swaps):
    state = State.empty(N)
    for seen in history_of(drawn):
        before = copy.deepcopy(state)
        after, plan = adaptive(state, seen, Budget(slots, swaps))
        for name in ("last_used", "uses", "long_uses", "resident"):
            assert np.array_equal(getattr(state, name), getattr(before, name)), "the state given was changed in place"
        assert len(plan.admit) <= swaps
        assert state.resident[plan.evict].all()
        assert not state.resident[plan.admit].any()
        assert set(plan.admit.tolist()) <= set(seen.keys.tolist())
        assert after.resident.sum() <= slots
        state = after


def test_rescaling_forgets_nothing_that_counts():
    """Two half-lives around the restart of a unit: sums run on as if nothing had happened."""
    for half_life, name in ((SHORT, "uses"), (LONG, "long_uses")):
        state = replace(State.empty(N), windows=RESCALE * half_life - half_life)
        state, _ = adaptive(state, touched([3]), Budget(0, 0))
        for _ in range(2 * half_life):
            state, _ = adaptive(state, touched([]), Budget(0, 0))
        unit = module._unit(state.windows, half_life)
        assert unit < 4
        assert math.isclose(getattr(state, name)[3] / unit, 0.25, rel_tol=1e-12)


def test_what_begins_is_worth_half_and_told_again_the_same():
    values = np.random.default_rng(0).random(N) * 8
    state = module.begun(values, 5)
    np.testing.assert_allclose(module.remembered(state), values / 2)
    assert set(np.flatnonzero(state.resident)) == set(np.argsort(-values)[:5])


def test_the_dearer_a_copy_the_longer_it_takes_to_be_admitted():
    waits = []
    for copy_misses in (0.5, 2.0, 4.0):
        budget = Budget(1, 9, copy_misses)
        state, _ = run(State.empty(N), [touched([1])] * 3, budget)
        windows = 0
        while not state.resident[2]:
            state, _ = run(state, [touched([1, 2])] if windows % 2 else [touched([2])], budget)
            windows += 1
        waits.append(windows)
    assert waits == sorted(set(waits))


def run(state, history, budget):
    plan = None
    for seen in history:
        state, plan = adaptive(state, seen, budget)
    return state, plan


def test_an_empty_slot_takes_one_use():
    _, plan = run(State.empty(N), [touched([3, 1])], Budget(4, 9))
    assert plan.admit.tolist() == [1, 3]


def test_no_swaps_and_no_slots():
    for budget in (Budget(0, 5), Budget(5, 0)):
        _, plan = run(State.empty(N), [touched([1, 2])] * 5, budget)
        assert plan.admit.tolist() == plan.evict.tolist() == []


def test_one_use_more_than_the_victim_is_not_enough():
    """Key 2 has to be worth its copy: it replaces key 1 only when it is ahead by the margin."""
    budget = Budget(1, 9)
    state, _ = run(State.empty(N), [touched([1])] * 2, budget)
    plans = []
    for _ in range(4):
        state, plan = run(state, [touched([2])], budget)
        plans.append((plan.admit.tolist(), plan.evict.tolist()))
    assert plans == [([], []), ([], []), ([], []), ([2], [1])]


def test_a_single_pass_over_many_keys_evicts_nothing():
    """A scan is what least-recently-used gets wrong."""
    budget = Budget(4, 9)
    state, _ = run(State.empty(N), [touched([0, 1, 2, 3])] * 3, budget)
    state, _ = run(state, [touched([key]) for key in range(4, N)], budget)
    assert np.flatnonzero(state.resident).tolist() == [0, 1, 2, 3]


def test_what_stopped_coming_goes_before_what_was_always_rare():
    """Key 1 was used in every window and then no more; key 2 in every eighth, as ever."""
    budget = Budget(2, 9)
    state, _ = run(State.empty(N), [touched([1, 2] if t % 8 == 0 else [1]) for t in range(200)], budget)
    assert state.resident[[1, 2]].all()
    state, _ = run(state, [touched([2, 5] if t % 8 == 0 else [5]) for t in range(41)], budget)
    assert np.flatnonzero(state.resident).tolist() == [2, 5]


def test_a_prompt_does_not_wash_out_the_working_set():
    """20,000 rows over every expert, none favoured, weigh less than the ten windows that made the working set."""
    budget = Budget(10, 100)
    everything, working = list(range(N)), list(range(10))
    state, _ = run(State.empty(N), [touched(working)] * 10, budget)
    state, _ = run(state, [touched(everything, [2048 * 2 // N] * N, 2048)] * 10, budget)
    assert np.flatnonzero(state.resident).tolist() == working


def test_a_prompt_foretells_its_answer():
    """An expert that half the rows of a prompt chose is worth a slot; one that a few chose is not."""
    rows = [1024, *[51] * 19]
    _, plan = run(State.empty(N), [touched(range(20), rows, 2048)], Budget(10, 100))
    assert plan.admit.tolist() == [0]


def test_better_than_a_fixed_set_where_the_topic_moves():
    """A short piece of the frozen drifting trace; the figures of the whole are the workbench's."""
    windows = [Touched(w.keys, w.counts, w.rows) for w, _ in zip(trace("drifting"), range(1600), strict=False)]
    keys, first = 24576, 400
    budget = Budget(keys // 10, 25)
    counts = np.bincount(np.concatenate([w.keys for w in windows[:first]]), minlength=keys)
    fixed = np.zeros(keys, np.bool_)
    fixed[np.argsort(-counts, kind="stable")[: budget.slots]] = True
    state, hits, fixed_hits, admitted, proven, waiting = State.empty(keys), 0, 0, 0, 0, np.zeros(keys, np.bool_)
    for number, seen in enumerate(windows):
        if number >= first:
            hits += state.resident[seen.keys].sum()
            fixed_hits += fixed[seen.keys].sum()
        proven += waiting[seen.keys].sum()
        waiting[seen.keys] = False
        state, plan = adaptive(state, seen, budget)
        waiting[plan.evict], waiting[plan.admit] = False, True
        admitted += len(plan.admit)
    assert hits > 1.1 * fixed_hits
    assert proven / admitted > 0.6
