"""On a CPU a decode window gives the bits of single rows, whatever its size and whatever drafts were rejected."""

import random
from pathlib import Path

import pytest

from bench import exactness
from bench.exactness_cases import Ground, windows_on_the_cpu
from bench.gpu_lane_rig import small_pack
from bench.tiny_model import TinyConfig
from shared_experts.pack import Pack

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model" / "pack"
# Sizes that do not fill a vector.
ODD = TinyConfig(
    vocab_size=301, hidden_size=96, num_hidden_layers=4, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2,
    ngram_vocab_size_base=100,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("experts", ["f32", "q4g32"])
def test_a_random_model(experts, tmp_path):
    with small_pack(tmp_path, ODD, experts=experts) as pack:
        ids = random.Random(3).choices(range(2, 301), k=58)
        ids[50] = int(pack.manifest.config["eos_token_id"])
        windows_on_the_cpu(Ground(pack, "cpu", ids, 40, 64))


@pytest.mark.parametrize("prompt", [90, 510])  # a query reads everything; it chooses, from a place inside a window on
def test_the_demo_model(prompt):
    with Pack.open(DEMO) as pack:
        ground, what = exactness.ground(pack, "cpu", (prompt, 12, 640))
        assert what == "sources"
        assert windows_on_the_cpu(ground).endswith("to the bit")
