"""Products of a few rows on a CPU, and what is applied element by element: a row's bits are its own."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.errors import NativeKernelFailed
from lanes.experts import reference
from lanes.experts.native import ISAS, ExpertKernel, native_library
from lanes.models import few
from lanes.models.few import few_rows
from lanes.models.ops import FEW_ROWS, alike, product

sizes = st.integers(1, 70)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("one_thread")
@given(st.integers(1, 16), sizes, sizes, st.integers(0, 9))
def test_sums_are_those_of_an_fp32_expert(rows, outputs, inputs, seed):
    x, matrix = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 10)
    truth = [reference.dots_f32(matrix.numpy(), row) for row in x.numpy()]
    assert few_rows(x, matrix).numpy().tobytes() == np.stack(truth).tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_and_any_number_of_threads(isa, monkeypatch):
    if ISAS[isa] > ISAS[ExpertKernel.best_isa()]:
        pytest.skip("not on this CPU")
    x, matrix = random(7, 519), random(1037, 519)  # large enough to be shared among threads
    want = few_rows(x, matrix)
    for threads in (1, 3):
        library, pool = native_library(), ctypes.c_void_p()
        assert library.expert_pool_create(ISAS[isa], None, threads, ctypes.byref(pool)) == 0
        monkeypatch.setattr(few, "_pool", lambda _, found=(library, pool): found)
        got = few_rows(x, matrix)
        library.expert_pool_destroy(pool)
        assert torch.equal(got, want)
    torch.testing.assert_close(want, F.linear(x, matrix), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_thread")
@settings(max_examples=40)
@given(st.integers(1, FEW_ROWS), sizes, sizes, st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_beside_a_row_moves_no_bit_of_it(rows, outputs, inputs, dtype):
    x, matrix = random(FEW_ROWS, inputs), random(outputs, inputs, seed=1).to(dtype)
    alone = torch.cat([product(row[None], matrix) for row in x])
    assert torch.equal(product(x[:rows], matrix), alone[:rows])
    assert torch.equal(product(x[-rows:], matrix), alone[-rows:])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, F.silu, F.softplus])
@pytest.mark.parametrize("columns", [1, 4, 8, 31, 48, 64])
def test_elements_do_not_depend_on_their_row_number(function, columns):
    x = random(FEW_ROWS, columns) * 4
    alone = torch.cat([alike(function, row[None]) for row in x])
    for rows in range(1, FEW_ROWS + 1):
        assert torch.equal(alike(function, x[:rows]), alone[:rows])
    torch.testing.assert_close(alone, function(x))


def test_what_is_no_product_is_refused():
    x, matrix = random(4, 8), random(3, 8)
    for bad in ((x.double(), matrix), (x, matrix.bfloat16()), (x, matrix[:, :4])):
        with pytest.raises(ValueError, match="matrix"):
            few_rows(*bad)
    assert few_rows(random(16, 8), matrix).shape == (16, 3)
    for rows in (0, 17):
        with pytest.raises(NativeKernelFailed):
            few_rows(random(rows, 8), matrix)
    wide = 1 << 17
    assert few_rows(random(1, wide), random(1, wide)).shape == (1, 1)
    with pytest.raises(NativeKernelFailed):
        few_rows(random(1, wide + 1), random(1, wide + 1))


def test_strides_do_not_matter():
    x, matrix = random(8, 3), random(5, 8)
    assert torch.equal(few_rows(x.t(), matrix), few_rows(x.t().contiguous(), matrix))
    assert torch.equal(few_rows(x.t(), matrix.t().contiguous().t()), few_rows(x.t(), matrix))
