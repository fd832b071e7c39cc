"""The rehearsal on a model small enough for a test: what it writes converts, and its figures add up."""

from dataclasses import replace

import pytest

from bench.rehearsal import rehearse, released
from tests.fakes.checkpoints import SMALL


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp8", 1)])
def test_a_rehearsal_takes_its_time_apart(tmp_path, dtype, width):
    config = replace(SMALL, hidden_size=128, ple_embed_dim=128, moe_intermediate_size=64)
    result = rehearse(tmp_path, dtype, "q8", 1, config, rounds=1, rate_seconds=0.01)
    assert list(tmp_path.iterdir()) == []
    sizes = result["source_bytes"]
    weights = 4 * 4 * 3 * 128 * 64 * width
    assert weights <= sizes["experts"] <= weights + 4 * 4 * 3 * 4 * (width == 1)
    assert sum(sizes.values()) < result["checkpoint_bytes"] < sum(sizes.values()) + 200_000
    (run,) = result["runs"]
    assert run["pack_bytes"].keys() == run["section_seconds"].keys() == {"experts", "ngram", "dense"}
    assert sum(run["section_seconds"].values()) <= run["seconds"]
    assert result["reached_source_bytes_per_s"]["experts"] == pytest.approx(
        sizes["experts"] / run["section_seconds"]["experts"], rel=0.01
    )
    assert result["share_of_slower"][0] > 0


def test_the_released_model_has_the_sizes_that_are_known():
    rates = {"experts": 1e9, "ngram": 1e9, "dense": 1e9}
    for dtype, size in (("bf16", 360e9), ("fp8", 185e9)):
        whole = released(dtype, rates, 0, 0)
        assert whole["source_bytes"] == pytest.approx(size, rel=0.01)
        assert whole["minutes"] == pytest.approx(size / 1e9 / 60, rel=0.02)
