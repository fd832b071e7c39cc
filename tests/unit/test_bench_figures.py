"""Figures, comparisons, workloads and plots of `expressway bench`: pure functions."""

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.aligned import Rules
from bench.load import markdown
from bench.load.compare import SAME, Unlike, compare, ratio_of
from bench.load.door import Reply
from bench.load.drive import arrivals_s
from bench.load.figures import Goals, figures, good, percentile, rows, slices
from bench.load.runs import Asked, idle_lanes, windows_s
from bench.load.workloads import WORKLOADS, digest, script

# Frozen: another digest is other work, and earlier reports are not comparable with later ones any more.
DIGEST = "363e5880f2e9d427fa44fa87c5e979e781a12074db1cfab64fba723128b47445"
RULES = Rules(warm_up_s=0.0, min_window_s=5.0)


def reply(key, lane="lane-0", begin=0.0, ttft=0.5, gap=0.1, tokens=100, error=None, **more) -> Reply:
    pieces = tuple((begin + ttft + k * gap, 1) for k in range(tokens))
    end = pieces[-1][0] if pieces else begin + ttft
    values = {"prompt_tokens": 50, "cached_tokens": 10, "counters": {}, "text": "", **more}
    return Reply(key=key, lane=lane, begin_s=begin, end_s=end, pieces=pieces, error=error, **values)


def test_the_work_is_the_work_that_was_frozen():
    assert digest() == DIGEST


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_script_is_the_same_every_time_and_differs_by_agent_conversation_and_nonce(name):
    def made(agent=0, session=0, nonce=""):
        return script(WORKLOADS[name], 0.05, 1, agent, session, nonce)

    assert made() == made()
    assert made(agent=1).system == made().system
    assert made(agent=1).turns != made().turns != made(session=1).turns
    assert made(nonce="x").system == f"[x] {made().system}"
    assert made(nonce="x").turns == made().turns


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentiles_are_values_that_were_seen(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) / len(values) >= percent / 100 - 1e-9


def test_one_agent_has_one_span_whichever_lanes_answer_it():
    replies = [reply(str(k), f"lane-{k % 2}", begin=10.5 * k) for k in range(4)]
    assert not figures(replies, RULES, Goals(1.0, 0.2), 42.0)["aggregate"]["valid"]
    total = figures(replies, RULES, Goals(1.0, 0.2), 42.0, alone=True)["aggregate"]
    assert total["valid"], total["reasons"]
    assert total["tokens_per_s"] == pytest.approx(400 / 42, rel=0.03)
    assert sum(total["lanes"].values()) == pytest.approx(total["tokens_per_s"])
    assert total["lanes"].keys() == {"lane-0", "lane-1"}


def test_two_lanes_are_aligned_and_never_summed():
    replies = [reply("a", "lane-0"), reply("b", "lane-1", begin=1.0)]
    found = figures(replies, RULES, Goals(1.0, 0.2), 13.5)
    total = found["aggregate"]
    assert total["valid"], total["reasons"]
    assert total["tokens_per_s"] == pytest.approx(20.0, rel=0.05)
    assert total["window_s"] == pytest.approx(8.9, abs=0.11)
    assert set(total["lanes"]) == {"lane-0", "lane-1"}
    assert len(total["slices_tokens_per_s"]) == int(total["window_s"])
    assert total["variation"] == pytest.approx(0.0, abs=0.1)


def test_nothing_and_errors_alone_give_no_figure():
    found = figures([reply("a", tokens=0, error="queue_full")], RULES, Goals(1.0, 0.2), 1.0)
    assert found["aggregate"] is None
    assert found["ttft_s"]["p50"] is None
    assert found["errors"] == {"queue_full": 1}
    assert found["goodput"]["share"] == 0.0
    assert found["experts"] is None
    assert figures([], RULES, Goals(1.0, 0.2), 1.0)["goodput"]["share"] is None


def test_goals_at_the_limit_and_beyond():
    assert good(reply("a", ttft=0.5, gap=0.125), Goals(0.5, 0.125))
    assert not good(reply("a", ttft=0.5), Goals(0.499, 1.0))
    assert not good(reply("a", gap=0.125), Goals(1.0, 0.124))
    assert not good(reply("a", error="lane_lost"), Goals(9.0, 9.0))


def test_slices_hold_every_token_of_whole_seconds():
    lanes = {"x": [reply("a", ttft=0.0, gap=0.25, tokens=40).stream]}
    assert slices(lanes, 0.0, 9.5) == [4.0] * 9


def report(factor=1.0, count=12) -> dict:
    replies = [reply(f"k{n}", begin=20.0 * n, gap=0.1 * factor, ttft=0.5 * factor) for n in range(count)]
    conditions = {name: 1 for name in SAME if name != "host"}
    conditions |= {"scenario": "closed", "workload": "code", "load_average": [0.0], "scale": 1.0}
    return json.loads(json.dumps({
        "command": "x", "conditions": conditions, "server": {"model": "m", "url": "u"},
        "host": {"cpu": "c", "cpus": 2, "memory_bytes": 1 << 30, "kernel": "6"},
        "runs": {"1 agents": {"figures": figures(replies, RULES, Goals(1.0, 0.2), 100.0), "rows": rows(replies)}},
    }))  # fmt: skip


def test_twice_as_slow_is_a_ratio_of_two_and_its_inverse():
    slow = compare(report(), report(2.0))["1 agents"]
    assert {ratio.measure for ratio in slow} == {"ttft_s", "gap_s", "end_to_end_s"}
    for there, back in zip(slow, compare(report(2.0), report())["1 agents"], strict=True):
        assert there.ratio == pytest.approx(2.0, rel=1e-3)
        assert back.ratio == pytest.approx(0.5, rel=1e-3)
        assert there.certain
        assert there.pairs == 12


@pytest.mark.parametrize("name", SAME)
def test_unlike_runs_are_refused_by_name(name):
    other = report()
    if name == "host":
        other["host"]["cpus"] = 3
    else:
        other["conditions"][name] = 99
    with pytest.raises(Unlike, match=name):
        compare(report(), other)


def test_too_few_pairs_and_missing_parts_are_refused():
    with pytest.raises(Unlike, match="fewer than 5"):
        compare(report(count=4), report(count=4))
    other = copy.deepcopy(report())
    other["runs"]["more"] = other["runs"]["1 agents"]
    for a, b in ((report(), other), (other, report())):
        with pytest.raises(Unlike, match="more"):
            compare(a, b)


@given(st.lists(st.floats(-3, 3), min_size=5, max_size=40))
def test_an_interval_holds_its_ratio(logs):
    found = ratio_of(logs, "gap_s")
    assert found.low <= found.high
    assert math.exp(min(logs)) - 1e-9 <= found.low
    assert found.high <= math.exp(max(logs)) + 1e-9


def test_arrivals_are_a_schedule():
    times = arrivals_s(4.0, 100.0, 3)
    assert times == arrivals_s(4.0, 100.0, 3) == sorted(times)
    assert 300 < len(times) < 500
    assert times[-1] < 100


def test_the_markdown_shows_every_reason_of_a_window_that_does_not_count():
    found = report()
    found["runs"]["1 agents"]["figures"]["aggregate"] |= {"valid": False, "reasons": ["too short"]}
    text = markdown.report(found)
    assert "(does not count)" in text
    assert "too short" in text


def test_the_markdown_says_which_lanes_there_are():
    lanes = {"lane-0": {"device": "cuda", "cache_bytes": 3 << 30}, "lane-1": {"device": "cpu", "cache_bytes": 0}}
    server = {"model": "m", "url": "u", "lanes": lanes}
    assert "Lanes: lane-0 cuda, cache 3.00 GiB; lane-1 cpu, cache 0.00 GiB." in markdown.report(
        report() | {"server": server}
    )


def test_each_run_has_its_own_seconds_and_rules_or_those_of_all():
    rules = (Rules(min_window_s=10.0), Rules(min_window_s=60.0))
    asked = Asked("closed", (1, 2), (20.0, 75.0), 1.0, 1, rules, Goals(1.0, 1.0))
    assert [asked.run(k).seconds for k in (0, 1)] == [(20.0,), (75.0,)]
    assert [asked.run(k).rules[0].min_window_s for k in (0, 1)] == [10.0, 60.0]
    alike = replace(asked, seconds=(9.0,), rules=rules[:1])
    assert alike.run(0) == alike.run(1) == alike


def test_lanes_that_wrote_nothing_are_named():
    def part(*lanes):
        return {"figures": {"aggregate": {"lanes": dict.fromkeys(lanes, 1.0)} if lanes else None}}

    runs = {"1 agents": part("lane-1"), "2 agents": part("lane-0", "lane-1"), "3 agents": part()}
    idle = idle_lanes(runs)
    assert idle == {"1 agents": ["lane-0"], "3 agents": ["lane-0", "lane-1"]}
    assert "- 1 agents: lane-0 idle\n" in markdown.report(report() | {"idle_lanes": idle})
    assert idle_lanes({"1 agents": part("lane-0")}) == {}


def test_windows_that_do_not_count_are_not_told():
    def part(valid):
        return {"figures": {"aggregate": {"valid": valid, "window_s": 61.5}}}

    runs = {"1 agents": part(False), "2 agents": part(True), "3 agents": {"figures": {"aggregate": None}}}
    assert windows_s(runs) == {"2 agents": 61.5}


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.load.plots import tokens_by_second, write_plots

    found = report() | {"scaling_efficiency": {"1 agents": 1.0}}
    files = write_plots(found, tmp_path)
    assert [file.name for file in files] == ["1-agents.png", "scaling.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)
    counted = tokens_by_second(found["runs"]["1 agents"]["rows"])
    assert sum(counted["lane-0"]) == 1200
