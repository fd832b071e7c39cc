"""The delta rule of a prompt's rows in the interpreter: chunks, groups and ends anywhere, against token by token."""

import pytest
import torch
import triton

from lanes.kernels import delta_chunks
from lanes.models.delta_rule import RECURRENT_TOKENS, delta_rule, recurrent
from lanes.models.qwen4_exp.gpu.prompt import DeltaKernels
from tests.fakes import kernel_delta_chunks as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 130])
def test_any_number_of_tokens(tokens):
    cases.check_chunks("cpu", tokens, 2, 16, 32, seed=tokens)


@pytest.mark.parametrize(("forgets", "alike"), [(0.0, 0.0), (30.0, 0.0), (0.01, 1.0)])
def test_heads_that_keep_or_forget_and_keys_that_are_one(forgets, alike):
    """Keys that are all alike make the system's inverse large; forgetting takes decays out of fp32's range."""
    cases.check_chunks("cpu", 100, 1, 32, 16, forgets=forgets, alike=alike)


def test_groups_and_parts_change_next_to_nothing(monkeypatch):
    monkeypatch.setattr(delta_chunks, "GROUP", 64)
    monkeypatch.setattr(delta_chunks, "PARTS", 16)
    monkeypatch.setattr(delta_chunks, "COLUMNS", 16)
    cases.check_chunks("cpu", 150, 1, 32, 32)


@pytest.mark.parametrize(
    ("key", "value", "serves"), [(16, 256, True), (8, 16, False), (48, 64, False), (128, 512, False)]
)
def test_sizes_that_it_knows(key, value, serves):
    assert delta_chunks.serves(key, value) == serves
    if not serves:
        rows, row = torch.zeros(9, 1, key), torch.zeros(9, 1)
        with pytest.raises(AssertionError):
            delta_chunks.delta_rule(torch.zeros(1, key, value), rows, rows, torch.zeros(9, 1, value), row, row)


@pytest.mark.parametrize("shared", [2, 3])
def test_a_key_head_serves_several_value_heads(shared):
    draw = torch.Generator().manual_seed(shared)
    q, k = (torch.randn((70, 2, 16), generator=draw) * 0.2 for _ in range(2))
    v = torch.randn((70, 2 * shared, 16), generator=draw)
    g, beta = -torch.rand((70, 2 * shared), generator=draw), torch.rand((70, 2 * shared), generator=draw)
    one, other = torch.ones(2 * shared, 16, 16), torch.ones(2 * shared, 16, 16)
    got = delta_chunks.delta_rule(one, q, k, v, g, beta)
    repeated = (x.repeat_interleave(shared, 1) for x in (q, k))
    assert torch.equal(got, delta_chunks.delta_rule(other, *repeated, v, g, beta))
    assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, RECURRENT_TOKENS, RECURRENT_TOKENS + 1])
def test_a_few_tokens_go_one_by_one_to_the_bit(tokens):
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn((tokens, 1, 16), generator=draw) * 0.1 for _ in range(3))
    g, beta = -torch.rand((tokens, 1), generator=draw), torch.rand((tokens, 1), generator=draw)
    results = []
    for rule in (recurrent, DeltaKernels.__new__(DeltaKernels).rule, delta_rule):
        state = torch.ones(1, 16, 16)
        results.append((rule(state, q, k, v, g, beta), state))
    assert torch.equal(results[0][0], results[1][0]) == (tokens <= RECURRENT_TOKENS)
    torch.testing.assert_close(results[1], results[2])
