"""What `bench.decode` counts for a handshake: the job, with the GPU's side in Triton's interpreter, and the bound."""

import contextlib
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import triton

from bench import decode, decode_lane, handshake
from bench.bound import Ceilings
from lanes.experts.native import ExpertKernel
from lanes.kernels import experts as kernels
from tests.fakes.records import FakeRegion

GPU = Ceilings(cpu_read=10e9, hbm_copy=1e12, link=50e9, link_beside_cpu=40e9, cpu_beside_link=60e9)
STEP = {"tokens_per_s": 100.0, "resident_bytes": 1e9, "missed_bytes": 1e8}
PARTS = {"window": 4.0, "handshake": None}


@pytest.fixture
def measured(monkeypatch):
    """The job on a small region whose layers have more experts than a window reads."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: tests/gpu")
    monkeypatch.setattr(kernels, "GATE_TILE", (32, 4))

    def measure(layers=1, rounds=1):
        fake = FakeRegion("q4g32", 32, 32, layers, 8)
        region = SimpleNamespace(records_address=fake.record_address(0, 0))
        kernel = ExpertKernel(fake.layout, threads=2)
        try:
            return handshake.measure(region, fake.info, 2, kernel, torch.device("cpu"), rounds=rounds)
        finally:
            kernel.close()

    return measure


def test_a_window_with_answers_and_one_without_are_compared_by_turns(measured):
    """Both over resident experts with the same bits, or the job itself would fail."""
    found = measured()
    told = found["milliseconds"]
    assert told["handshake"] == pytest.approx(max(0.0, told["answered"] - told["alone"]), abs=2e-4)
    assert found["us_a_layer"] == pytest.approx(told["handshake"] * 1000, abs=0.1)
    assert (found["layers"], found["rounds"], found["doorbell"], found["refused"]) == (1, 1, "kernel", {})


def test_only_what_the_answer_adds_is_the_handshake(measured, monkeypatch):
    seen = []

    def medians(runs, rounds):
        for run in runs.values():
            run(0)
        seen.append(list(runs))
        return {"alone": 1.25, "answered": 1.59}

    monkeypatch.setattr(handshake, "medians", medians)
    told = measured()
    assert seen == [["alone", "answered"]]
    assert told["milliseconds"] == {"handshake": 0.34, "alone": 1.25, "answered": 1.59}
    assert told["us_a_layer"] == 340.0
    monkeypatch.setattr(handshake, "medians", lambda runs, rounds: {"alone": 1.3, "answered": 1.25})
    assert measured()["milliseconds"]["handshake"] == 0.0, "noise makes no bound faster than its bytes"


def test_windows_begin_and_end_the_share_alone_where_it_answers(measured, monkeypatch):
    begun = []
    begin = handshake.Share.begin
    monkeypatch.setattr(handshake.Share, "begin", lambda self, layers: (begun.append(layers), begin(self, layers))[1])
    measured(layers=2, rounds=1)
    probed = handshake.probe.REPLAYS
    assert begun == [2] * (probed + 3 + 1), "the probe's, then three rounds that are not counted and one that is"


def test_the_bound_counts_a_handshake_that_was_measured():
    bytes_ms = 1 + 1 + 1  # dense and resident at 1 TB/s, misses at 100 GB/s
    plain = decode.bounded({**STEP, "milliseconds": PARTS}, GPU, 10**9)
    assert plain["bound_tokens_per_s"] == pytest.approx(1e3 / bytes_ms, abs=0.01)
    assert plain["bound_counts"] == "no handshake"
    assert "bound_without_handshake" not in plain
    assert plain["milliseconds"] == PARTS
    told = decode.bounded({**STEP, "milliseconds": PARTS}, GPU, 10**9, 0.5)
    assert told["bound_tokens_per_s"] == pytest.approx(1e3 / (bytes_ms + 0.5), abs=0.01)
    assert told["of_bound"] == pytest.approx(100 * (bytes_ms + 0.5) / 1e3, abs=1e-3)
    assert told["bound_counts"] == "handshake, measured here"
    assert told["bound_without_handshake"] == plain["bound_tokens_per_s"]
    assert told["milliseconds"] == {"window": 4.0, "handshake": 0.5}
    assert decode.bounded({"milliseconds": PARTS}, None, 0, 0.5)["milliseconds"]["handshake"] == 0.5
    assert "milliseconds" not in decode.bounded(STEP, GPU, 10**9, 0.5), "a forced point tells no parts"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("breaks", [False, True])
def test_it_runs_behind_the_ceilings_of_a_gpu_lane_and_may_fail(tmp_path, monkeypatch, device, breaks):
    asked = []

    def job(kind, options, **_):
        asked.append(kind)
        if kind == "ceilings":
            rates = {"cpu_read": 10e9} | ({} if device == "cpu" else {"hbm_copy": 1e12, "link": 5e10})
            rates |= {} if device == "cpu" else {"link_beside_cpu": 4e10, "cpu_beside_link": 6e10}
            return {"bytes_per_s": rates, "dense_bytes": 10**9, "cores": 4}
        if kind == "handshake":
            if breaks:
                raise OSError("no doorbell")
            return {"milliseconds": {"handshake": 0.5}}
        if kind == "forced":
            return {"points": [STEP]}
        return {**STEP, "hit_rate": 0.9, "milliseconds": PARTS}

    monkeypatch.setattr(decode, "job", job)
    config = SimpleNamespace(vocab_size=64, num_hidden_layers=2, num_experts_per_tok=3, num_experts=8)
    synthetic = SimpleNamespace(
        shape=SimpleNamespace(config=config, topics=4, pairs=16), folder=tmp_path / "pack",
        manifest=SimpleNamespace(experts=SimpleNamespace(record_bytes=100)),
        region=SimpleNamespace(header=SimpleNamespace(total_bytes=1600)), lend=lambda socket: contextlib.nullcontext(),
    )  # fmt: skip
    chosen = Namespace(
        tokens=4, warm=4, prompt=4, device=device, cores=None, prefill_chunk=None, start=0, vram_budget=["1MiB", "0"],
        forced=[1.0], forced_budget=None, kernels=False, drafted=None,
    )  # fmt: skip
    jobs = decode.Jobs(100.0, None)
    found = decode.measured(synthetic, tmp_path, chosen, jobs)
    first = ["ceilings", *(["handshake"] if device == "cuda" else [])]
    assert asked == [*first, "adaptive", "adaptive", "forced", "ceilings"]
    counted = device == "cuda" and not breaks
    for stretch in (found["adaptive"], *found["other_budgets"], *found["forced"]):
        assert stretch["bound_counts"] == ("handshake, measured here" if counted else "no handshake")
    assert found["milliseconds"]["handshake"] == (0.5 if counted else None)
    assert (found["handshake"] is not None) == counted
    assert list(jobs.failed) == (["handshake"] if device == "cuda" and breaks else [])


def test_the_job_has_its_kind():
    assert decode_lane.KINDS["handshake"] is decode_lane.handshakes
