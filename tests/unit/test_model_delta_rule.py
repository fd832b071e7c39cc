"""The gated delta rule: one token at a time in fp64 is the truth; windows never change a bit, chunks only rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.models.delta_rule import CHUNK_TOKENS, GROUP_CHUNKS, RECURRENT_TOKENS, chunked, delta_rule, recurrent

torch.set_num_threads(1)  # test workers share the cores

HEADS, KEY, VALUE = 3, 16, 8


def inputs(tokens: int, rate: float, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, HEADS, KEY, generator=random) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = torch.randn(tokens, HEADS, VALUE, generator=random)
    g, beta = -rate * torch.rand(tokens, HEADS, generator=random), torch.rand(tokens, HEADS, generator=random)
    return q * KEY**-0.5, k, v, g, beta


def start(seed: int) -> torch.Tensor:
    return torch.randn(HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(seed))


def truth(matrix: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the module's docstring writes it, in fp64."""
    matrix, out = matrix.double(), []
    q, k, v, g, beta = (x.double() for x in args)
    for t in range(q.shape[0]):
        matrix = matrix * g[t].exp()[:, None, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("nkv,nk->nv", matrix, k[t]))
        matrix = matrix + k[t, :, :, None] * delta[:, None]
        out.append(torch.einsum("nkv,nk->nv", matrix, q[t]))
    return torch.stack(out), matrix


@settings(max_examples=12)
@given(
    tokens=st.integers(1, CHUNK_TOKENS * GROUP_CHUNKS + CHUNK_TOKENS + 5),
    rate=st.sampled_from([0.0, 1e-3, 0.1, 2.0, 30.0, 500.0]),
    seed=st.integers(0, 1000),
)
def test_both_forms_equal_the_truth(tokens, rate, seed):
    args = inputs(tokens, rate, seed)
    expected, final = truth(start(seed), *args)
    for rule in (recurrent, chunked):
        matrix = start(seed)
        out = rule(matrix, *args)
        torch.testing.assert_close(out, expected.float(), atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(matrix, final.float(), atol=6e-6, rtol=1e-5)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 30.0])
def test_a_window_of_rows_gives_the_bits_of_single_rows(rate):
    for rows in (1, 2, 3, 4, RECURRENT_TOKENS):
        args = inputs(24, rate, rows)
        one, many = start(rows), start(rows)
        singly = torch.cat([delta_rule(one, *(x[t : t + 1] for x in args)) for t in range(24)])
        windows = torch.cat([delta_rule(many, *(x[t : t + rows] for x in args)) for t in range(0, 24, rows)])
        assert torch.equal(singly, windows)
        assert torch.equal(one, many)


def test_the_switch_to_chunks_is_seamless():
    for tokens in (RECURRENT_TOKENS, RECURRENT_TOKENS + 1):
        args = inputs(tokens, 0.5, 7)
        matrix = start(7)
        out = delta_rule(matrix, *args)
        expected, final = truth(start(7), *args)
        torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(matrix, final.float(), atol=1e-6, rtol=1e-5)


def test_nothing_is_read_beyond_the_window():
    args = [torch.cat((x, torch.full_like(x, float("nan")))) for x in inputs(70, 0.5, 1)]
    matrix = start(1)
    out = delta_rule(matrix, *(x[:70] for x in args))
    assert out.isfinite().all()
    assert matrix.isfinite().all()
