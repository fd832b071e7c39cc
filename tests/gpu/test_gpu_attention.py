"""The attention kernels compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes import kernel_attention as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_windows_with_rejected_rows(kind):
    windows = [(4, 4), (4, 3), (3, 3), (4, 0), (1, 1), (2, 2), (4, 1), (4, 4), (1, 1), (4, 4)]
    cases.check_windows("cuda", cases.TINY, 40, windows, kind=kind)


def test_the_true_sizes():
    cases.check_windows("cuda", cases.TRUE, 64, [(4, 4), (4, 2), (3, 3), (1, 1)], kind=torch.bfloat16)


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("length", [0, 1022, 1024, 4000, 8190, 16_386, 65_530])
def test_the_blocks_chosen(length, zeros):
    cases.check_choice("cuda", 4, 33_000, length, 512, seed=length, zeros=zeros)


def test_what_is_no_number_ranks_highest():
    cases.check_choice("cuda", 3, 33_000, 50_000, 512, hostile=True)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("length", [3, 2046, 2051, 8191, 40_000, 131_000])
def test_long_contexts(rows, length):
    cases.check_long_context("cuda", rows, 262_144, length)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "rows"), [(0, 19), (13, 5), (40, 6)])
def test_a_prompts_rows(start, rows, kind):
    cases.check_rows("cuda", cases.TINY, start, rows, kind=kind)


@pytest.mark.parametrize(("start", "rows"), [(0, 40), (2040, 30), (9000, 33), (40_000, 17)])
def test_a_prompts_rows_at_the_true_sizes(start, rows):
    cases.check_rows("cuda", cases.TRUE, start, rows, kind=torch.bfloat16)
