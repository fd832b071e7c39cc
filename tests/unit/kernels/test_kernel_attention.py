"""The attention kernels in the interpreter: windows of a growing conversation, the rule of the index, ties included."""

from dataclasses import replace

import pytest
import torch
import triton

from bench.tiny_model import TinyConfig
from lanes.kernels import attention, index
from lanes.kernels.attention import Norms, Partial, Queries
from lanes.kernels.index import Chosen
from lanes.models.ops import product
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.rows import Rotary, prepare
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.window import Window
from tests.fakes import kernel_attention as cases
from tests.fakes.kernel_attention import TINY

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_windows_with_rejected_rows(monkeypatch, kind):
    monkeypatch.setattr(attention, "SPLIT_TOKENS", 16)
    cases.check_windows("cpu", TINY, 32, [(4, 4), (4, 3), (3, 3), (4, 0), (1, 1), (2, 2), (4, 4)], kind=kind)


@pytest.mark.parametrize("block_tokens", [1, 3])
def test_other_sizes(block_tokens):
    """Three heads a key, sizes that are no powers of two, several blocks completed by one window."""
    shape = replace(
        TINY, heads=6, head_dim=24, index_dim=12, block_tokens=block_tokens, rotated_pairs=3, chosen=4
    )  # fmt: skip
    cases.check_windows("cpu", shape, 24, [(3, 3), (4, 2), (4, 4)])


def test_a_capacity_that_every_row_reads_whole():
    cases.check_windows("cpu", replace(TINY, chosen=8), 28, [(4, 4), (3, 3)])


@pytest.mark.parametrize(("length", "zeros"), [(0, 0.0), (40, 0.0), (61, 0.5), (255, 0.9), (399, 1.0)])
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_the_blocks_chosen(monkeypatch, length, zeros, chunk):
    monkeypatch.setattr(index, "CHUNK", chunk)
    cases.check_choice("cpu", 2, 201, length, 20, seed=length, zeros=zeros)
    cases.check_choice("cpu", 1, 201, length, 5, seed=length + 1, zeros=zeros, levels=1)


def test_what_is_no_number_ranks_highest(monkeypatch):
    monkeypatch.setattr(index, "CHUNK", 64)
    cases.check_choice("cpu", 2, 201, 390, 20, hostile=True)


@pytest.mark.parametrize("length", [4000, 8100])
def test_merges_of_every_width(monkeypatch, length):
    monkeypatch.setattr(index, "CHUNK", 512)
    monkeypatch.setattr(index, "FEW", triton.language.constexpr(1024))
    cases.check_choice("cpu", 1, 4100, length, 300, zeros=0.3)


def test_as_many_equal_candidates_as_there_can_be():
    """64 chunks of a million tokens, nothing scored: the first ones, as everywhere."""
    blocks, chosen = 64 * index.CHUNK, 512
    assert index.serves(blocks, chosen)
    ids = index.choose_rows(torch.zeros(1, 1, blocks), 4 * blocks - 1, 4, chosen, 32, blocks)
    assert ids[0].tolist() == list(range(chosen))
    assert not index.serves(65 * index.CHUNK, chosen)
    assert index.serves(65 * index.CHUNK, 65 * index.CHUNK)  # every row reads everything


def test_the_block_of_the_model():
    """The CPU lane's attention layer, a prompt at once, against windows of the kernels over the same weights."""
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
    layer = Attention(spec, Weights(tensors.__getitem__, torch.device("cpu"), torch.float32), 0)
    rotary = Rotary(spec.rotary_dim, spec.rope_theta, torch.device("cpu"))
    u = torch.randn(31, 32, generator=draw)
    state = SequenceState(spec.state_shape(torch.float32), 40)
    want = layer(u, prepare(Window.of_sequence([0] * 31, 0, 0), {0: state}, spec, rotary))

    shape = attention.AttentionShape(
        spec.heads, spec.kv_heads, spec.head_dim, spec.index_heads, spec.index_dim, spec.rotary_dim // 2,
        spec.index_block_tokens, spec.index_topk,
    )  # fmt: skip
    norms = Norms(
        *(1 + tensors[f"{name}.weight"] for name in ("q_norm", "k_norm", "indexer.q_layernorm", "indexer.k_layernorm"))
    )
    inputs = torch.cat([tensors[f"{name}.weight"] for name in [*list(shapes)[:3], "indexer.index_qk_proj"]])
    kept, start = cases.kept_of(shape, 40, torch.float32, "cpu"), 0
    for rows in (4, 1, 3, 4, 4, 2, 4, 4, 1, 4):
        window = slice(start, start + rows)
        projected, length = product(u[window], inputs), torch.tensor([start], dtype=torch.int32)
        queries = Queries(torch.empty(rows, 6, 16), torch.empty(rows, 2, 8))
        chosen, partial, out = Chosen.of(rows, 13, 4, "cpu"), Partial.of(shape, rows, "cpu"), torch.empty(rows, 6, 16)
        angles = cases.angles_of(shape, torch.arange(start, start + rows), spec.rope_theta)
        attention.prepare(shape, projected, length, norms, angles, spec.eps, queries, kept)
        index.choose(queries.index, kept.block_keys, length, 3, chosen)
        attention.attend(shape, queries.heads, chosen.ids, length, kept, partial)
        attention.merge(shape, partial, length, attention.gates(shape, projected), out)
        got = product(out.flatten(1), tensors["o_proj.weight"])
        torch.testing.assert_close(got, want[window], rtol=1e-4, atol=1e-5)
        start += rows
