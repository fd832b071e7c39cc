"""A whole model whose prompts run by a GPU's kernels, in the interpreter, beside the blocks of every device."""

import pytest
import torch
import triton

from lanes.models import load_model
from lanes.models.qwen4_exp import attention, deltanet, ngram
from lanes.models.qwen4_exp.gpu.prompt import use_kernels
from lanes.state.pool import StatePool
from lanes.tolerance import FP32
from lanes.window import Window
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack
from tests.fakes.reference_model import naive_experts

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")

PROMPT = [(7 * n * n + 3 * n) % 61 for n in range(40)]
CONTEXT = 48


def read(model, chunks):
    """Logits of all rows, and of a token behind them."""
    states = StatePool(model.state_shape, model.state_shape.bytes(CONTEXT))
    slot, found, start = states.open(CONTEXT), [], 0
    for rows in (*chunks, 1):
        ids = [*PROMPT, 5][start : start + rows]
        found.append(model.forward(Window.of_sequence(ids, start, slot, logits="all"), states))
        start += rows
    states.close(slot)
    return torch.cat(found)


@pytest.mark.parametrize("chunks", [(40,), (2, 13, 25)])
def test_margin_equal_to_the_blocks_of_every_device(tmp_path, chunks, monkeypatch):
    torch.set_num_threads(1)
    with Pack.open(tiny_pack(tmp_path, "f32")) as pack:
        plain, with_kernels = (load_model(pack, naive_experts(pack)) for _ in range(2))
        fetched = use_kernels(with_kernels, CONTEXT)
        want = read(plain, chunks)
        monkeypatch.setattr(ngram, "SLICE_ROWS", 9)
        monkeypatch.setattr(deltanet, "SLICE_ROWS", 11)
        monkeypatch.setattr(attention, "SLICE_ROWS", 10)
        got = read(with_kernels, chunks)
    held = list(fetched._held)
    assert any(rows.any() for rows in held)
    fetched.erase()
    assert not any(rows.any() for rows in held)
    assert (want - got).abs().max() <= FP32 * want.abs().max()
    assert not torch.equal(want, got), "other kernels, other last bits"
