"""What `plan` says of a GPU lane is within a fifth of the newest results, by the assumed rates and by derived ones.

Whoever replaces a file of bench/results finds out here what it does to a plan."""

import json
from pathlib import Path

import pytest

from bench import gpu_rates
from coordinator.sizing import Host, Load, Rates, plan
from tests.unit.test_sizing import GIB, LARGE

RESULTS = Path(__file__).parents[2] / "bench/results"
CHUNK = 8192


def result(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


DECODED, PREFILLED, SERVED = (result(f"{name}.json") for name in ("decode-h200", "prefill-h200", "load_h200_aligned"))
STEPS = [
    pytest.param(run["hit_rate"], run["tokens_per_s"], id=f"{run['hit_rate']} hits")
    for run in (*DECODED["forced"], DECODED["adaptive"], *DECODED["other_budgets"])
]
PROMPTS = [
    pytest.param(prompt["tokens"], prompt["tokens_per_s"], id=f"{prompt['tokens']} {prompt['cache']}")
    for prompt in PREFILLED["prompts"]
    if prompt["tokens"] >= CHUNK
]


def derived() -> Rates:
    solved = gpu_rates.solve(DECODED)["rates"] | gpu_rates.solve_prompts(DECODED, PREFILLED)["rates"]
    return Rates(**solved)


def test_the_results_are_of_the_model_that_is_planned_for():
    pack = DECODED["pack"]
    assert (pack["layers"], pack["experts"]) == (LARGE.layers, LARGE.experts)
    assert pack["region_bytes"] == pytest.approx(LARGE.region_bytes, rel=1e-4)
    assert DECODED["dense_bytes_per_step"] == pytest.approx(2 * LARGE.dense_elements_per_token, rel=0.02)
    assert len(STEPS) >= 8
    assert len(PROMPTS) >= 2


@pytest.mark.parametrize("rates", [Rates(), derived()], ids=["assumed", "derived"])
@pytest.mark.parametrize(("hits", "measured"), STEPS)
def test_steps(hits, measured, rates):
    found = plan(LARGE, Host("cuda", 256 * GIB, 16 * GIB, 16), Load(1, 8192, hits), rates, 1)
    assert 0.8 < found.tokens_per_s[0] / measured < 1.2


@pytest.mark.parametrize("rates", [Rates(), derived()], ids=["assumed", "derived"])
@pytest.mark.parametrize(("tokens", "measured"), PROMPTS)
def test_prompts(tokens, measured, rates):
    found = plan(LARGE, Host("cuda", 256 * GIB, 16 * GIB, 16), Load(1, tokens), rates, 1)
    assert found.prefill_chunk_tokens == CHUNK
    assert 0.8 < found.prefill_tokens_per_s / measured < 1.2


@pytest.mark.parametrize("agents", [1, 2])
def test_served_lanes(agents):
    """Of two lanes as many work as there are agents, each with its own half of the cores: the middle time between
    tokens."""
    figures = SERVED["runs"][f"{agents} agents"]["figures"]
    cores, hits = SERVED["host"]["cpus"] * agents // 2, figures["experts"]["hit_rate"]
    found = plan(LARGE, Host("cuda", 256 * GIB, 16 * GIB, cores), Load(1, 16384, hits), Rates(), agents)
    assert 0.8 < 1 / found.tokens_per_s[0] / figures["gap_s"]["p50"] < 1.2


def test_what_is_held_out_is_predicted():
    solved = gpu_rates.solve(DECODED)
    assert all(each["within_20_percent"] for each in (solved["held_out"], *solved["held_out_other_budgets"]))
    assert gpu_rates.solve_prompts(DECODED, PREFILLED)["within_20_percent"]
