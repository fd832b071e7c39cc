"""What `bench.decode` is made of: forced sets, bounds, parts of a step, ceilings of this host's memory."""

import contextlib
import json
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bench import ceilings, decode, decode_lane, result, step_kernels, step_parts
from bench.bound import Ceilings, StepBytes, prompt_s, step_s
from bench.forced import Held, hottest
from bench.synthetic.pack import made
from bench.synthetic.shape import SHAPES
from lanes.answer import Answer
from lanes.counters import Counters
from lanes.experts.native import ExpertKernel
from lanes.experts.policy import Budget, State, Touched
from lanes.runner import ModelRunner
from shared_experts.attach import attach


def touched(*keys):
    return Touched(np.array(keys), np.ones(len(keys), np.int64), 1)


def test_a_held_set_comes_in_at_once_and_nothing_else_does():
    held, state, budget = Held(10), State.empty(10), Budget(slots=3, swaps=1)
    held.want(np.array([1, 2, 5]))
    state, plan = held(state, touched(0, 1), Budget(slots=3, swaps=0))  # copies are under way
    assert (plan.admit.tolist(), plan.evict.tolist(), held.missing) == ([], [], 3)
    state, plan = held(state, touched(0, 1), budget)
    assert (plan.admit.tolist(), plan.evict.tolist(), held.missing) == ([1, 2, 5], [], 0)
    assert np.flatnonzero(state.resident).tolist() == [1, 2, 5]
    held.want(np.array([5, 9]))
    state, plan = held(state, touched(9), budget)
    assert (plan.admit.tolist(), plan.evict.tolist()) == ([9], [1, 2])
    held.want(np.array([0, 3, 5, 9]))  # more than there are slots
    state, plan = held(state, touched(0, 3), budget)
    assert (plan.admit.tolist(), held.missing) == ([0], 1)


@pytest.mark.parametrize(
    ("rate", "keys"), [(0, []), (0.5, [3]), (0.51, [1, 3]), (0.8, [1, 3]), (0.81, [0, 1, 3]), (1, [0, 1, 3])]
)
def test_the_hottest_keys_that_take_a_share(rate, keys):
    assert hottest(np.array([2, 3, 0, 5]), rate).tolist() == keys


def test_the_bound_of_a_step_and_of_a_prompt():
    moved = StepBytes(dense=4e9, resident=2e9, missed=1e9)
    assert step_s(moved, Ceilings(cpu_read=10e9)) == pytest.approx(0.7)
    gpu = Ceilings(cpu_read=10e9, hbm_copy=1e12, link=50e9, link_beside_cpu=40e9, cpu_beside_link=60e9)
    assert step_s(moved, gpu, handshake_s=0.001) == pytest.approx(0.006 + 0.01 + 0.001)
    assert prompt_s(100e9, gpu) == pytest.approx(2)
    assert prompt_s(100e9, Ceilings(cpu_read=10e9)) == pytest.approx(10)


def test_parts_are_counted_from_the_first_token_on(monkeypatch):
    monkeypatch.setattr(ModelRunner, "forward", lambda self: time.sleep(0.002))
    monkeypatch.setattr(Answer, "draw", lambda self: "token")
    runner, answer = ModelRunner.__new__(ModelRunner), Answer.__new__(Answer)
    for device in ("cpu", "cuda"):
        with step_parts.timed(device) as parts:
            runner.forward()  # the prompt
            assert answer.draw() == "token"
            first = dict(parts.spent_ns)
            for _ in range(3):
                runner.forward()
                answer.draw()
        assert first == {}
        told = parts.milliseconds(3, 5.0)
        assert told["window"] >= 2
        assert told["step"] == 5.0
        assert told["other"] == pytest.approx(5.0 - told["window"] - told["sampling"], abs=1e-3)
        assert told["link_share"] is None
        assert (told["dense"] is None) == (told["attention"] is None) == (device == "cuda")
    spent = parts.spent_ns.copy()
    runner.forward()
    assert parts.spent_ns == spent  # nothing is timed any more


def test_ceilings_of_a_cpu_are_read_rates_of_the_region(tmp_path):
    with made(tmp_path / "pack", SHAPES["small"].changed(layers=2)) as synthetic:
        kernel = ExpertKernel(synthetic.manifest.experts.layout, threads=1)
        with (
            synthetic.lend(tmp_path / "owner.sock"),
            attach(tmp_path / "owner.sock", synthetic.manifest, 60.0) as region,
        ):
            found = ceilings.measure(region, kernel, "cpu")
        kernel.close()
    assert 1e8 < found.cpu_read < 1e12
    assert found.hbm_copy is found.link is None


class Reads:
    """A kernel that notes what it is asked to read."""

    def __init__(self):
        self.asked = []

    def read(self, records):
        self.asked.append(records.tolist())
        time.sleep(0.001)
        return 0


def test_only_pages_that_were_touched_before_are_timed(monkeypatch):
    header = SimpleNamespace(layers=3, experts=5, record_bytes=100)
    region, kernel = SimpleNamespace(header=header, records_address=7), Reads()
    monkeypatch.setattr(ceilings, "TOUCHED_BYTES", 1000)
    monkeypatch.setattr(ceilings, "READ_BYTES", 399)
    found = ceilings.measure(region, kernel, "cpu")
    touched_before, *rounds = kernel.asked
    assert len(set(touched_before)) == 10
    assert set(touched_before) <= set(range(7, 1507, 100))
    assert touched_before != sorted(touched_before)
    assert len(rounds) == ceilings.ROUNDS
    assert {len(records) for records in rounds} == {3}
    timed = {record for records in rounds for record in records}
    assert timed == set(touched_before)  # all of it, in turn: no round finds it in a cache
    assert 0 < found.cpu_read <= 300 / 0.001


def test_rounds_go_on_as_long_as_what_they_run_beside(monkeypatch):
    header = SimpleNamespace(layers=1, experts=1, record_bytes=100)
    kernel = Reads()
    reader = ceilings._Reader(SimpleNamespace(header=header, records_address=0), kernel, None)

    def work():
        while len(kernel.asked) < 3 * ceilings.ROUNDS:
            time.sleep(0.001)

    reader.beside(work)
    assert len(kernel.asked) >= 3 * ceilings.ROUNDS
    with pytest.raises(OSError, match="no"):
        reader.beside(lambda: (_ for _ in ()).throw(OSError("no")))


def test_a_job_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def run(kind, options, *, limit_s, **rest):
        if kind == "broken":
            raise subprocess.CalledProcessError(1, ["a", "command"])
        return {"limit_s": limit_s, **rest}

    monkeypatch.setattr(decode, "job", run)
    out = tmp_path / "decode.json"
    jobs = decode.Jobs(100.0, out)
    assert jobs.run("first", "whole", [], rows=2)["rows"] == 2
    assert jobs.run("second", "broken", []) is None
    assert 0 < jobs.run("third", "whole", [])["limit_s"] <= 100.0
    kept = json.loads(out.read_text())
    assert set(kept["unfinished"]) == {"first", "third"}
    assert set(kept["failed"]) == {"second"}
    told = decode.Jobs(100.0, None).run("kept for others", "whole", [], keep_s=40.0)
    assert told["left_s"] < told["limit_s"] <= 60.0
    late = decode.Jobs(0.0, None)
    assert late.run("any", "whole", []) is None
    assert "time is up" in late.failed["any"]


@pytest.mark.parametrize(("answers", "found"), [(0, 0), (1, 0), (2, 1), (3, 2), (9, 3)])
def test_forced_rates_end_in_time_with_what_was_measured(monkeypatch, answers, found):
    """Time is up after so many answers; the first one only tells which experts are used."""
    asked = []

    class Lane:
        def ask(self, ids, tokens):
            asked.append(tokens)
            return decode_lane.Answered([1] * tokens, list(range(tokens)), Counters(), Counters(expert_hits=3 * tokens))

    monkeypatch.setattr(decode_lane, "started", lambda options, held: contextlib.nullcontext(Lane()))
    monkeypatch.setattr(decode_lane.measure, "decode_keys", lambda trace: (2, 4, np.array([0, 1, 1, 5])))
    monkeypatch.setattr(decode_lane.measure, "uses", lambda keys, pairs: np.bincount(keys, minlength=pairs))
    monkeypatch.setattr(decode_lane, "settle", lambda lane, held, ids, tokens, go_on: 0)
    monkeypatch.setattr(decode_lane, "time", SimpleNamespace(monotonic=lambda: float(len(asked))))
    job = {
        "options": [], "trace": "x", "start": 0, "prompt": 2, "tokens": 3, "rates": [0.5, 0.75, 1.0], "pairs": 8,
        "vocabulary": 4096, "topics": 16, "record_bytes": 10, "choices": 3, "left_s": answers,
    }  # fmt: skip
    points = decode_lane.at_forced_rates(job)["points"]
    assert [point["forced_rate"] for point in points] == [0.5, 0.75, 1.0][:found]


def test_kernels_are_of_the_part_whose_name_is_theirs_alone():
    names = step_kernels.names()
    assert {name: names[name] for name in ("_gate_up", "_down", "_combine", "_attend", "_score")} == {
        "_gate_up": "experts", "_down": "experts", "_combine": "experts", "_attend": "attention", "_score": "attention",
    }  # fmt: skip
    assert "_prepare" not in names  # DeltaNet has one, too
    told = step_kernels.grouped({"_gate_up": 4000.0, "_combine": 200.0, "ampere_gemm": 6000.0, "_prepare": 1.0}, 2)
    assert told["milliseconds"] == {"experts": 2.1, "attention": 0.0, "rest": 3.0005}
    assert list(told["kernels"]) == ["ampere_gemm", "_gate_up", "_combine", "_prepare"]
    assert step_kernels.grouped({}, 2) == {"milliseconds": None, "kernels": {}}


def test_a_result_tells_no_path_of_this_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["python", "--out", "/home/me/out.json", "a/b"])
    for words in (None, ["--out", "/home/me/out.json", "a/b"]):
        framed = result.frame("bench.x", words, pack={}, conditions={})
        assert framed["command"] == "python -m bench.x --out out.json a/b"
