"""The two equations of `bench.rates`, the command lines that results keep, and the baseline of private copies."""

import pytest

from bench import rates, startup
from bench.memory import Pages, ProcessMemory, RegionMemory


def said(layers: int, read_bytes: float) -> dict:
    return {"model": {"layers": layers}, "plans": [{"bytes_per_token": {"dense": [read_bytes, read_bytes]}}]}


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_two_packs_give_back_the_rates_they_were_made_with(cores):
    layer_s, rate = 900e-6, 5e9 * cores
    packs = {"narrow": (8, 1e6), "wide": (12, 80e6)}
    times = {name: layers * layer_s + read / rate for name, (layers, read) in packs.items()}
    found = rates.solve(said(*packs["narrow"]), said(*packs["wide"]), times, cores)
    assert found["cpu_layer_us"] == pytest.approx(900)
    assert found["core_gb_per_s"] == pytest.approx(5)


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="noisy"):
        rates.solve(said(8, 1e6), said(8, 80e6), {"narrow": 0.02, "wide": 0.01}, 2)


def test_results_keep_no_path_of_this_machine():
    assert startup._told(["--pack", "/secret", "--rounds", "3", "--out", "/x"]) == ["--rounds", "3"]
    assert startup.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0}


def test_private_copies_are_counted_by_what_each_lane_touched():
    def process(own, touched, share):
        region = Pages(100, touched, share, 0)
        return ProcessMemory(1, Pages(0, own + touched, own + share, own), region, 0)

    memory = RegionMemory(process(5, 0, 0), (process(50, 100, 50), process(50, 100, 50)))
    assert memory.total_pss_bytes == 205
    assert memory.mapping_pss_bytes_sum == 100
    assert memory.private_copies_bytes == 305
