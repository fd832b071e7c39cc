"""The rehearsal on a model small enough for a test: what it writes converts, and its figures add up."""

from dataclasses import replace

import pytest

from bench.rehearsal import Turns, rehearse, released
from tests.fakes.checkpoints import SMALL


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp8", 1)])
def test_a_rehearsal_takes_its_time_apart(tmp_path, dtype, width):
    config = replace(SMALL, hidden_size=128, ple_embed_dim=128, moe_intermediate_size=64, num_experts=16)
    result = rehearse(tmp_path, dtype, "q8", 1, config, window_s=0.005)
    assert list(tmp_path.iterdir()) == []
    sizes = result["source_bytes"]
    weights = 4 * 16 * 3 * 128 * 64 * width
    assert weights <= sizes["experts"] <= weights + 4 * 16 * 3 * 4 * (width == 1)
    assert sum(sizes.values()) < result["checkpoint_bytes"] < sum(sizes.values()) + 200_000
    assert result["pack_bytes"] > 64 * 28_672
    assert result["peak_bytes"] > 1 << 20
    assert min(result["reached_source_bytes_per_s"].values()) > 0


def test_shares_compare_each_window_with_its_neighbours():
    assert Turns([3.0, 8.0], [2.0, 4.0, 12.0], [], []).shares() == [1.0, 1.0]


def test_the_released_model_has_the_sizes_that_are_known():
    rates = {"experts": 1e9, "ngram": 1e9, "dense": 1e9}
    for dtype, size in (("bf16", 360e9), ("fp8", 185e9)):
        whole = released(dtype, rates, 0, 0)
        assert whole["source_bytes"] == pytest.approx(size, rel=0.01)
        assert whole["minutes"] == pytest.approx(size / 1e9 / 60, rel=0.02)
