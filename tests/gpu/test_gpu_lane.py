"""A lane on the GPU that is there, on small random packs: rows of the exactness table (bench.exactness)."""

import random

import pytest
import torch

from bench.exactness import TABLE
from bench.exactness_cases import Ground
from bench.gpu_lane_rig import CONTEXT, small_pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = {name: case for rows in TABLE.values() for name, case in rows.items()}
PROMPT, REST = 50, 24  # tokens: more blocks than are read; of what windows read
# Pack of int8 experts and fp32 matrices: what depends on either.
OTHER = ("repeat, graphs and launches", "CPU share of misses", "prompt: rings, cancels, new lane", "lane on the CPU")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    with small_pack(folder, dense="bf16") as first, small_pack(folder, experts="q8", dense="f32") as second:
        yield {"q4g64": first, "q8": second}


@pytest.mark.parametrize(("format", "row"), [*(("q4g64", row) for row in ROWS), *(("q8", row) for row in OTHER)])
def test_row(packs, format, row):
    ids = random.Random(1).choices(range(2, 300), k=PROMPT + REST)
    ROWS[row](Ground(packs[format], "cuda", ids, PROMPT, CONTEXT))
