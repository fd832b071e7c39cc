"""A lane on the GPU that is there, on small random packs: the same cases as bench.gpu_lane_check."""

import pytest
import torch

from bench import gpu_lane_cases as cases
from bench.gpu_lane_check import TOKENS, region
from bench.gpu_lane_rig import small_pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module", params=["q4g64-bf16", "q8-f32"])
def pack(request, tmp_path_factory):
    experts, dense = request.param.split("-")
    with small_pack(tmp_path_factory.mktemp("pack"), experts=experts, dense=dense) as pack:
        yield pack


def test_the_region_is_read_in_place(pack):
    region(pack, "cuda")


@pytest.mark.parametrize(
    "case",
    [cases.against_the_cpu, cases.drafts_change_nothing, cases.taking_turns, cases.branching,
     cases.whatever_is_cached, cases.guesses, cases.late_guesses,
     cases.whatever_feeds_a_prompt, cases.greatest_alone,
     cases.captured_as_launched, cases.whoever_computes_misses],
)  # fmt: skip
def test_case(pack, case):
    case(pack, "cuda", cases.prompt(pack, TOKENS))
