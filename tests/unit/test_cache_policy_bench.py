"""The replay counts what it says it counts."""

import json

import numpy as np
import pytest

from bench import cache_policy
from bench.cache_baselines import least_frequently_used, least_recently_used, tiny_lfu
from bench.cache_policy import LINK_BYTES_PER_S, RECORD_BYTES, Replay, changed, recorded, run, times
from lanes.experts import adaptive as rules
from lanes.experts.policy import Budget, State, Touched
from lanes.experts.trace import TraceHeader, TraceWriter
from tests.fakes.cache_plans import scripted

N = 12


def touched(*keys, rows=1):
    return Touched(np.array(keys, np.int64), np.ones(len(keys), np.int64), rows)


def test_a_replay_by_hand():
    """Eight windows, the first two do not count; one prompt chunk is no step, but its copy is one."""
    windows = [
        touched(0, 1), touched(0, 1), touched(0, 1), touched(2, 3), touched(0, 1, 2, rows=99), touched(2, 3),
        touched(3, 4), touched(4, 5),
    ]  # fmt: skip
    plans = [([], [0]), ([], []), ([], [1]), ([], [2]), ([0], [3]), ([1], [4]), ([3], []), ([], [])]
    figures = run(Replay("x", N, windows, 16), scripted(*plans), 4, 4)
    # Steps: hits 0; none; 2, 3; 3 and 4; 4. Of the admissions 1 (by the chunk), 2, 3 and 4 all were used later.
    assert figures["hit_rate"] == pytest.approx(6 / 10)
    assert figures["copied_records_per_window"] == pytest.approx(4 / 5)
    assert figures["admitted_hit_share"] == 1.0


def test_an_admission_that_goes_unused_is_not_counted_as_used():
    windows = [touched(0)] * 4 + [touched(1)] * 4
    plans = [([], [])] * 4 + [([], [5]), ([5], [6]), ([], [1]), ([], [])]
    figures = run(Replay("x", N, windows, 16), scripted(*plans), 4, 4)
    assert figures["admitted_hit_share"] == pytest.approx(1 / 3, abs=1e-3)


@pytest.mark.parametrize("policy", [least_recently_used, least_frequently_used, tiny_lfu])
def test_baselines_keep_the_invariant_of_policies(policy):
    rng = np.random.default_rng(1)
    state, budget = State.empty(40), Budget(9, 3)
    for _ in range(300):
        seen = touched(*np.unique(rng.geometric(0.15, 8) % 40).tolist())
        before, uses = state.resident.copy(), state.uses.copy()
        after, plan = policy(state, seen, budget)
        np.testing.assert_array_equal(state.resident, before)
        np.testing.assert_array_equal(state.uses, uses)
        assert before[plan.evict].all()
        assert not before[plan.admit].any()
        assert np.isin(plan.admit, seen.keys).all()
        assert len(plan.admit) <= budget.swaps
        before[plan.evict], before[plan.admit] = False, True
        np.testing.assert_array_equal(after.resident, before)
        assert np.count_nonzero(before) <= budget.slots
        state = after


def test_frequency_keeps_what_recency_drops():
    """A key used ten times outlives two that were used once; it goes only when it has fewer uses than what comes."""
    budget = Budget(1, 1)
    windows = [touched(1)] * 10 + [touched(2), touched(3)]
    for policy, kept in ((least_frequently_used, 1), (tiny_lfu, 1), (least_recently_used, 3)):
        state = State.empty(5)
        for window in windows:
            state, _ = policy(state, window, budget)
        assert np.flatnonzero(state.resident).tolist() == [kept]


def test_a_copy_costs_as_much_link_time_as_a_miss():
    assert times(400, 80, 5)["tokens_per_s_link"] == times(400, 85, 0)["tokens_per_s_link"]
    seconds = 1 / times(400, 180, 0)["tokens_per_s_link"] - 1 / times(400, 80, 0)["tokens_per_s_link"]
    assert seconds == pytest.approx(100 * RECORD_BYTES / LINK_BYTES_PER_S, rel=0.01)


def test_changed_constants_come_back():
    names = ("SHORT", "LONG", "SPELL", "_LONG_SHARE", "MARGIN")
    before = [getattr(rules, name) for name in names]
    with changed({"SHORT": 32, "LONG": 32, "MARGIN": 7.0}):
        assert (rules.SHORT, rules.LONG, rules.MARGIN, rules._LONG_SHARE) == (32, 32, 7.0, 1.0)
        assert rules.SPELL == 2 / (1 - 2.0 ** (-1 / 32))
    assert before == [getattr(rules, name) for name in names]


def test_a_recorded_trace_is_replayed_through_every_policy(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    writer = TraceWriter(tmp_path / "mine.trace", TraceHeader(2, 20, bytes(32)))
    for _ in range(60):
        writer.record(touched(*np.unique(rng.geometric(0.1, 12) % 40).tolist()))
    writer.close()
    assert recorded(tmp_path / "mine.trace").keys == 40
    monkeypatch.setattr(cache_policy, "RECIPES", {})
    assert cache_policy.main(["--recorded", str(tmp_path / "mine.trace"), "--out", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result == json.loads(capsys.readouterr().out)
    assert str(tmp_path) not in result["command"].split("--out")[0]
    assert {"command", "versions", "host", "pack", "conditions", "figures"} == set(result)
    for entry in result["figures"]["recorded mine"].values():
        assert max(f["hit_rate"] for f in entry.values()) == entry["clairvoyant"]["hit_rate"]
        assert entry["fixed"]["copied_records_per_window"] == 0
