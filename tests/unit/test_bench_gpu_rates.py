"""Rates of a GPU host out of a decode result: what it was made with comes back, and `plan` computes with it alike."""

import json

import pytest

from bench import gpu_rates
from coordinator.sizing import Host, Load, Rates, plan
from tests.unit.test_sizing import LARGE

CEILINGS = {"cpu_read": 130.0, "hbm_copy": 4000.0, "link": 55.0, "link_beside_cpu": 50.0, "cpu_beside_link": 75.0}
EVERY = LARGE.expert_bytes_per_token
DENSE = LARGE.dense_elements_per_token * LARGE.pack_element_bytes


SHARE = 0.64  # of link and CPU


def run(hits: float, layer_us: float) -> dict:
    resident, missed = EVERY * hits, EVERY * (1 - hits)
    seconds = (DENSE + resident) / 4000e9 + missed / (SHARE * 125e9) + LARGE.layers * layer_us * 1e-6
    return {"hit_rate": hits, "resident_bytes": resident, "missed_bytes": missed, "tokens_per_s": 1 / seconds}


def decoded(adaptive_us: float = 100.0) -> dict:
    return {
        "host": {"cpus": 16}, "pack": {"layers": LARGE.layers, "fingerprint": "f"}, "dense_bytes_per_step": DENSE,
        "ceilings_gb_per_s": CEILINGS, "adaptive": run(0.64, adaptive_us),
        "forced": [run(0.65, 100.0), run(0.75, 100.0), run(0.8, 130.0), run(0.85, 100.0), run(0.95, 100.0)],
    }  # fmt: skip


@pytest.mark.parametrize("hits", [0.5, 0.64, 0.9])
def test_plan_computes_what_was_measured(hits):
    rates = Rates(**gpu_rates.solve(decoded())["rates"])
    assert rates.gpu_layer_us == pytest.approx(100.0, abs=0.1)  # though one step was slow
    assert rates.gpu_miss_share == pytest.approx(SHARE, abs=0.001)
    found = plan(LARGE, Host("cuda", 1 << 38, 16 << 30, 17), Load(1, 8192, hits), rates, 1)
    assert found.tokens_per_s[0] == pytest.approx(run(hits, 100.0)["tokens_per_s"], rel=1e-3)


def test_what_is_held_out_changes_no_rate_and_tells_how_far_it_is_off(tmp_path, capsys):
    fair, slow = gpu_rates.solve(decoded()), gpu_rates.solve(decoded(adaptive_us=200.0))
    assert slow["rates"] == fair["rates"]
    assert fair["held_out"]["predicted_over_measured"] == 1.0
    assert slow["held_out"]["predicted_over_measured"] > 1.2
    for result, code in ((decoded(), 0), (decoded(200.0), 1)):
        (tmp_path / "decode.json").write_text(json.dumps(result))
        assert gpu_rates.main([str(tmp_path / "decode.json")]) == code
        assert json.loads(capsys.readouterr().out)["held_out"]["within_20_percent"] is (code == 0)


def test_misses_are_never_faster_than_their_ceilings_and_one_step_is_no_line():
    one = decoded() | {"forced": [run(0.75, 100.0)]}
    assert gpu_rates.solve(one)["rates"]["gpu_miss_share"] == 1.0
    fast = decoded() | {"forced": [run(0.5, 100.0), run(0.9, 300.0)]}
    assert gpu_rates.solve(fast)["rates"]["gpu_miss_share"] == 1.0


def test_other_budgets_are_held_out_too(tmp_path, capsys):
    (tmp_path / "decode.json").write_text(json.dumps(decoded() | {"other_budgets": [run(0.86, 200.0)]}))
    assert gpu_rates.main([str(tmp_path / "decode.json")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["within_20_percent"] for each in found["held_out_other_budgets"]] == [False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"forced": []}, "forced"),
        ({"ceilings_gb_per_s": {"cpu_read": 50.0}}, "without a GPU"),
        ({"dense_bytes_per_step": 1e15}, "faster than their bytes"),
        ({"adaptive": None}, "NoneType"),
    ],
)
def test_a_result_without_what_is_needed_is_refused(tmp_path, capsys, change, reason):
    (tmp_path / "decode.json").write_text(json.dumps(decoded() | change))
    assert gpu_rates.main([str(tmp_path / "decode.json")]) == 1
    assert reason in capsys.readouterr().err


def read(tokens: int, crossed_bytes: float, slower: float = 1.0, cache: str = "warm") -> dict:
    """A prompt whose passes take 0.2 s, whose rows 0.2 ms, in chunks of 8,192."""
    seconds = slower * (-(-tokens // 8192) * 0.2 + max(crossed_bytes / 55e9, tokens * 0.2e-3))
    return {"tokens": tokens, "crossed_bytes": crossed_bytes, "cache": cache, "tokens_per_s": tokens / seconds}


def prefilled(slower: float = 1.0) -> dict:
    pace = {"dense_row_s": 0.05e-3, "expert_row_s": 0.15e-3, "pass_s": 0.2}
    return {
        "pack": {"layers": LARGE.layers, "fingerprint": "f"}, "ceilings_gb_per_s": CEILINGS,
        "lane_said": {"prefill_chunk": {"rows": 8192}, "prompt_reading": {"pace": pace}},
        "prompts": [read(1536, 60e9), read(32768, 240e9, slower), read(32768, 240e9, 2.0, "cold")],
    }  # fmt: skip


def test_of_prompts_too_plan_computes_what_was_measured(tmp_path, capsys):
    (tmp_path / "decode.json").write_text(json.dumps(decoded()))
    (tmp_path / "prefill.json").write_text(json.dumps(prefilled()))
    words = [str(tmp_path / "decode.json"), "--prefill", str(tmp_path / "prefill.json")]
    assert gpu_rates.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["predicted_over_measured"] for each in found["held_out_prompts"]] == [1.0, 1.0, 2.0]
    planned = plan(LARGE, Host("cuda", 1 << 38, 16 << 30, 16), Load(1, 8192), Rates(**found["rates"]), 1)
    assert planned.prefill_s["products"] == pytest.approx(8192 * 0.2e-3, rel=1e-3)
    assert planned.prefill_s["launches"] == pytest.approx(0.2, rel=1e-3)
    (tmp_path / "prefill.json").write_text(json.dumps(prefilled(slower=1.3)))
    assert gpu_rates.main(words) == 1  # the long one of a warm cache is far off
    (tmp_path / "prefill.json").write_text(json.dumps(prefilled() | {"pack": {"fingerprint": "another"}}))
    assert gpu_rates.main(words) == 1
    assert "two packs" in capsys.readouterr().err
