"""`python -m bench.prefill` from end to end at a test's size, with two lanes; what is no reading is refused."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.bound import Ceilings
from bench.prefill import Bench, Prompts, Reading, main, read, shown
from bench.second_lane import StartFailed
from bench.synthetic.pack import made
from bench.synthetic.shape import SHAPES

LIMIT_S = 600


def test_a_result_has_what_the_contract_asks_for(tmp_path):
    out = tmp_path / "prefill.json"
    command = [
        sys.executable, "-m", "bench.prefill", "--scale", "small", "--vram-budget", "1MiB", "--sizes", "96",
        "--lanes", "2", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"command", "versions", "host", "pack", "conditions"} < set(result)
    assert str(tmp_path) not in out.read_text()
    assert result["tokens_per_s_32k"] is None  # not asked for
    cold, warm = result["prompts"]
    assert (cold["cache"], warm["cache"], cold["tokens"]) == ("cold", "warm", 96)
    for row in (cold, warm):
        assert 0 < row["utilisation"] < 1 < row["times_the_bound"]
        assert row["tokens_per_s"] <= row["tokens_per_s_in_windows"]
        assert row["region_bytes"] > row["cache_bytes"] > 0
        assert row["crossed_bytes"] == row["region_bytes"] + row["cache_bytes"], "a CPU lane reads all of it"
        assert row["gap_s"] == pytest.approx(row["first_token_s"] - row["bound_s"], abs=2e-4)
        assert (row["overlap"], row["streamed_bytes"], row["window_tokens"]) == (None, 0, 0), "nothing is copied"
    assert result["rings"] == []
    assert result["lane_said"]["prefill_chunk"]["rows"] == 256
    assert result["lane_said"]["prefill_chunk"]["reason"]
    assert [lane["beside_tokens_per_s"] > 0 for lane in result["two_lanes"]["lanes"]] == [True, True]


def test_a_remembered_prompt_is_no_reading(tmp_path):
    chosen = argparse.Namespace(
        cores=[], sizes=[64], device="cpu", vram_budget="0", prefill_chunk=16, sweep=[], rings=[], repeats=1
    )  # fmt: skip
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with made(tmp_path / "pack", SHAPES["small"].changed(layers=4, experts=8)) as synthetic:
        bench = Bench(synthetic, run, chosen)
        with synthetic.lend(run / "owner.sock"), bench.lane(0) as socket:
            ids = bench.prompts.next(64)
            reading = read(socket, ids)
            assert (reading.tokens, reading.windows, reading.cache_bytes) == (64, 4, 0)
            assert 0 < reading.prefill_ns <= reading.first_token_ns - reading.began_ns
            with pytest.raises(StartFailed, match="of a prompt of 66 tokens"):
                read(socket, [*ids, 7, 8])


def test_a_reading_beside_the_bound_of_the_link_or_of_the_cores(tmp_path):
    reading = Reading(1000, 0, 2 * 10**9, 10**9, 4, cache_bytes=30 * 10**9, region_bytes=50 * 10**9, cpu_bytes=0)
    link = shown("warm", reading, Ceilings(40e9, 1e12, 50e9, 40e9, 60e9))
    assert (link["bound_s"], link["utilisation"], link["tokens_per_s"]) == (1, 0.5, 500)
    assert link["tokens_per_s_in_windows"] == 1000
    assert (link["crossed_in_vain"], link["overlap"], link["gap_s"]) == (0, None, 1)
    ahead = replace(reading, streamed_bytes=80 * 10**9, streaming_ns=16 * 10**8, stream_wait_ns=4 * 10**8)
    link = shown("warm", ahead, Ceilings(40e9, 1e12, 50e9, 40e9, 60e9))
    assert (link["crossed_bytes"], link["crossed_in_vain"], link["utilisation"]) == (80 * 10**9, 0.375, 0.8)
    assert (link["bound_s"], link["times_the_bound"]) == (1, 2), "what nobody chose had not to come"
    assert (link["streaming_s"], link["stream_wait_s"], link["overlap"]) == (1.6, 0.4, 0.75)
    cores = shown("warm", reading, Ceilings(80e9))
    assert (cores["bound_s"], cores["times_the_bound"]) == (1, 2)
    with made(tmp_path / "pack", SHAPES["small"].changed(layers=4, experts=8, ngram=False)) as synthetic:
        prompts = Prompts(synthetic)
        assert len({prompts.next(8)[0] for _ in range(4)}) == 4


def test_a_ring_is_a_gpu_lanes(capsys):
    with pytest.raises(SystemExit):
        main(["--rings", "1,2"])
    assert "no ring" in capsys.readouterr().err


def test_a_lane_with_a_ring_of_its_own_size():
    """The limits are its process's, and what is no lane's option is refused as by any lane."""
    code = (
        "import sys; from lanes import limits; from bench.ring_lane import main; code = main(['3', '--owner']);"
        "print(limits.RING_SLOTS, limits.MAX_RING_SLOTS, 'torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["3", "3", "False", "64"], done.stderr
