"""The simulator: everybody is served once, nothing happens twice in different ways, and its bounds are bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.agent_traces import TRACES, Turn, conversations, noisy_tenant, read_trace
from bench.lane_rules import Asked
from bench.placement import RULES, Hardware, Simulation, batch_bound_s, steady_tokens_per_s

SMALL = Hardware(lanes=2)


@pytest.mark.parametrize("rule", RULES)
def test_every_turn_is_served_once_and_a_run_is_a_function_of_its_arguments(rule: str) -> None:
    trace = conversations(5, 4, seed=3)
    simulation = Simulation(trace, rule, SMALL)
    figures = simulation.run()
    done = simulation.done
    assert sorted((asked.turn.session, asked.turn.think_s) for asked in done) == sorted(
        (turn.session, turn.think_s) for turns in trace for turn in turns
    )
    assert all(asked.arrived <= asked.began <= asked.first_token <= asked.ended for asked in done)
    assert Simulation(conversations(5, 4, seed=3), rule, SMALL).run() == figures
    assert figures.read_again_tokens >= 0
    assert figures.refused == 0


def test_the_ideal_reads_nothing_twice_and_one_lane_is_one_lane() -> None:
    trace = conversations(3, 4, seed=1)
    assert Simulation(trace, "ideal", SMALL).run().read_again_tokens == 0
    alone = Hardware(lanes=1)
    ours = Simulation([trace[0]], "ours", alone).run()
    assert ours == Simulation([trace[0]], "ideal", alone).run()
    assert ours.wait_p95 == 0


def test_steady_output_is_that_while_all_are_under_way() -> None:
    def asked(session: str, tokens: int, first_token: float, ended: float) -> Asked:
        return Asked(Turn(session, 1, tokens, 0.0), iter(()), 1, 0.0, 0, 0.0, first_token, ended)

    done = [asked("a", 100, 1.0, 11.0), asked("b", 40, 3.0, 7.0), asked("b", 10, 8.0, 9.0), asked("a", 9, 15.0, 16.0)]
    assert steady_tokens_per_s(done) == pytest.approx((60 + 40 + 10) / 6)  # from 3 to 9


@pytest.mark.parametrize(
    ("count", "rule"), [(4, "ours-parked"), (6, "ours"), (6, "ours-parked"), (9, "ours"), (9, "ours-parked")]
)
def test_oversubscribed_lanes_give_what_one_gives_that_is_never_idle_and_never_reads_twice(
    count: int, rule: str
) -> None:
    traces = conversations(count, 20, 3)
    ours, ideal = Simulation(traces, rule, Hardware()), Simulation(traces, "ideal", Hardware())
    for simulation in (ours, ideal):
        simulation.run()
    assert steady_tokens_per_s(ours.done) >= 0.95 * steady_tokens_per_s(ideal.done)


def test_a_tenant_at_a_hundred_times_the_load_does_not_double_the_others_wait() -> None:
    alone, beside = (noisy_tenant(times, span_s=600.0) for times in (1, 100))
    waits = [Simulation(trace, "ours", Hardware()).run().wait_p99["calm"] for trace in (alone, beside)]
    assert waits[1] <= 2 * waits[0]


def test_no_makespan_is_below_the_bound() -> None:
    batch = TRACES["batch-of-30"]()
    bound_s = batch_bound_s(batch, SMALL)
    for rule in RULES:
        assert Simulation(batch, rule, SMALL).run().makespan >= bound_s - 0.1


def test_a_recorded_trace_and_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    turn = {"session": "a", "new_tokens": 5, "output_tokens": 2, "think_s": 0.5}
    path.write_text("".join(json.dumps(each) + "\n" for each in (turn, turn | {"session": "b"}, turn)))
    assert read_trace(path) == [[Turn("a", 5, 2, 0.5)] * 2, [Turn("b", 5, 2, 0.5)]]
    for wrong in (
        {},
        turn | {"new_tokens": 0},
        turn | {"think_s": -1},
        turn | {"x": 1},
        turn | {"session": "x" * 5000},
    ):
        path.write_text(json.dumps(turn) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(ValueError, match="line 2"):
            read_trace(path)
