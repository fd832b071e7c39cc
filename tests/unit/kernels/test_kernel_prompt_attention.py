"""Attention of a prompt's rows in the interpreter: at every place of a sequence, against the twins; and in a layer."""

from dataclasses import replace

import pytest
import torch
import triton

from bench.tiny_model import TinyConfig
from lanes.kernels import index, prompt_attention
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.gpu import reader as reader_module
from lanes.models.qwen4_exp.gpu.reader import PromptReader
from lanes.models.qwen4_exp.rows import Rotary, prepare
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.window import Window
from tests.fakes import kernel_attention as cases
from tests.fakes.kernel_attention import TINY

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 19), (13, 5), (14, 1), (15, 4), (40, 6)])
def test_rows_at_any_place(start, rows, kind):
    """13 complete blocks of 4 at most; from position 15 on there are more than the 3 that are chosen."""
    cases.check_rows("cpu", TINY, start, rows, kind=kind, seed=start)


@pytest.mark.parametrize("block_tokens", [1, 3])
def test_other_sizes(block_tokens):
    shape = replace(TINY, heads=6, head_dim=24, index_dim=12, block_tokens=block_tokens, index_heads=1, chosen=9)
    cases.check_rows("cpu", shape, 17, 14, seed=block_tokens)


def test_steps_and_chunks_that_end_anywhere(monkeypatch):
    monkeypatch.setattr(index, "CHUNK", 16)
    monkeypatch.setattr(prompt_attention, "STEP_BYTES", 0)
    cases.check_rows("cpu", replace(TINY, block_tokens=1, chosen=21), 60, 5)


def test_rows_without_chosen_blocks_are_a_mistake():
    q, none = torch.zeros(2, 4, 32), torch.zeros((1, 3), dtype=torch.int32)
    keys = torch.zeros(2, 40, 32)
    prompt_attention.attend(TINY, q, none, 14, keys, keys, q, torch.empty_like(q))
    with pytest.raises(AssertionError, match="cannot read all"):
        prompt_attention.attend(TINY, q, none, 15, keys, keys, q, torch.empty_like(q))


@pytest.mark.parametrize("cuts", [[31], [5, 17, 9]])
def test_a_layer_reads_as_it_does_without(cuts, monkeypatch):
    monkeypatch.setattr(reader_module, "MOST_PRODUCT_BYTES", 4 * 2 * 10 * 7)
    config = TinyConfig(
        hidden_size=32, num_hidden_layers=1, layer_types=("full_attention",), ple_layer_ids=(), num_attention_heads=6,
        num_key_value_heads=3, head_dim=16, partial_rotary_factor=0.5, mrope_section=(2, 1, 1), indexer_budget=12,
        indexer_compress_ratio=3, indexer_n_heads=2, indexer_head_dim=8,
    )  # fmt: skip
    spec = Spec.from_config(config.text_config(mtp=False))
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "q_proj": (192, 32), "k_proj": (48, 32), "v_proj": (48, 32), "o_proj": (32, 96),
        "indexer.index_qk_proj": (24, 32), "q_norm": (16,), "k_norm": (16,), "indexer.q_layernorm": (8,),
        "indexer.k_layernorm": (8,),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(size, generator=draw) * 0.3 for name, size in shapes.items()}
    rotary = Rotary(spec.rotary_dim, spec.rope_theta, torch.device("cpu"))
    u = torch.randn(31, 32, generator=draw)
    results = []
    for reader in (None, PromptReader(spec)):
        layer = Attention(spec, Weights(tensors.__getitem__, torch.device("cpu"), torch.float32), 0)
        layer.reader = reader
        state, first, out = SequenceState(spec.state_shape(torch.float32), 40), 0, []
        for rows in cuts:
            part = u[first : first + rows]
            out.append(layer(part, prepare(Window.of_sequence([0] * rows, first, 0), {0: state}, spec, rotary)))
            state.length = first = first + rows
        results.append(torch.cat(out))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
