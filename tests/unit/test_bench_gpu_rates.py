"""Rates of a GPU host out of a decode result: what it was made with comes back, and `plan` computes with it alike."""

import json

import pytest

from bench import gpu_rates
from coordinator.sizing import Host, Load, Rates, plan
from tests.unit.test_sizing import LARGE

CEILINGS = {"cpu_read": 130.0, "hbm_copy": 4000.0, "link": 55.0, "link_beside_cpu": 50.0, "cpu_beside_link": 75.0}
EVERY = LARGE.expert_bytes_per_token
DENSE = LARGE.dense_elements_per_token * LARGE.pack_element_bytes


def run(hits: float, layer_us: float) -> dict:
    resident, missed = EVERY * hits, EVERY * (1 - hits)
    seconds = (DENSE + resident) / 4000e9 + missed / 125e9 + LARGE.layers * layer_us * 1e-6
    return {"hit_rate": hits, "resident_bytes": resident, "missed_bytes": missed, "tokens_per_s": 1 / seconds}


def decoded(adaptive_us: float = 100.0) -> dict:
    return {
        "host": {"cpus": 16}, "pack": {"layers": LARGE.layers}, "dense_bytes_per_step": DENSE,
        "ceilings_gb_per_s": CEILINGS, "adaptive": run(0.64, adaptive_us),
        "forced": [run(0.65, 90.0), run(0.75, 100.0), run(0.85, 110.0)],
    }  # fmt: skip


@pytest.mark.parametrize("hits", [0.5, 0.64, 0.9])
def test_plan_computes_what_was_measured(hits):
    rates = Rates(**gpu_rates.solve(decoded())["rates"])
    assert rates.gpu_layer_us == 100.0
    found = plan(LARGE, Host("cuda", 1 << 38, 16 << 30, 16), Load(1, 8192, hits), rates, 1)
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
