"""QSA attention against a query-by-query definition, and the bounds of its memory."""

import math
import random

import pytest
import torch

from bench.tiny_model import TinyConfig
from lanes.models.ops import rms, rotate
from lanes.models.qwen4_exp import attention as attention_module
from lanes.models.qwen4_exp import indexer as indexer_module
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.rows import Rotary, prepare
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.window import Window

torch.set_num_threads(1)  # test workers share the cores

CONFIG = TinyConfig(
    hidden_size=32, num_hidden_layers=1, layer_types=("full_attention",), ple_layer_ids=(), num_attention_heads=6,
    num_key_value_heads=3, head_dim=16, partial_rotary_factor=0.5, mrope_section=(2, 1, 1), indexer_budget=12,
    indexer_compress_ratio=3, indexer_n_heads=2, indexer_head_dim=8,
)  # fmt: skip
SPEC = Spec.from_config(CONFIG.text_config(mtp=False))
ROTARY = Rotary(SPEC.rotary_dim, SPEC.rope_theta, torch.device("cpu"))


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "q_proj": (192, 32), "k_proj": (48, 32), "v_proj": (48, 32), "o_proj": (32, 96),
        "indexer.index_qk_proj": (24, 32), "q_norm": (16,), "k_norm": (16,),
        "indexer.q_layernorm": (8,), "indexer.k_layernorm": (8,),
    }  # fmt: skip
    return {
        f"{name}.weight": torch.randn(shape, generator=draw) * (0.3 if len(shape) == 2 else 0.1)
        for name, shape in shapes.items()
    }


WEIGHTS = tensors()


def block(dtype: torch.dtype = torch.float32) -> Attention:
    return Attention(SPEC, Weights(WEIGHTS.__getitem__, torch.device("cpu"), dtype), 0)


def run(layer: Attention, u: torch.Tensor, cuts: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    state = SequenceState(SPEC.state_shape(dtype), 200, allocate=lambda s, t: torch.full(s, float("nan"), dtype=t))
    parts, first = [], 0
    for rows in cuts:
        window = Window.of_sequence([0] * rows, first, 0)
        parts.append(layer(u[first : first + rows], prepare(window, {0: state}, SPEC, ROTARY)))
        state.length = first = first + rows
    return torch.cat(parts)


def naive(u: torch.Tensor) -> torch.Tensor:
    """One query, one head at a time."""
    w = {name.removesuffix(".weight"): value for name, value in WEIGHTS.items()}
    n, d, size = u.shape[0], SPEC.head_dim, SPEC.index_block_tokens

    def normed(x: torch.Tensor, name: str, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = ROTARY.at(positions)
        return rotate(rms(x, SPEC.eps) * (1 + w[name]), cos[:, None], sin[:, None])

    at = torch.arange(n)
    both = (u @ w["q_proj"].T).view(n, 6, 2 * d)
    q, gate = normed(both[..., :d], "q_norm", at), both[..., d:]
    k = normed((u @ w["k_proj"].T).view(n, 3, d), "k_norm", at)
    v = (u @ w["v_proj"].T).view(n, 3, d)
    index = u @ w["indexer.index_qk_proj"].T
    index_q = normed(index[:, :16].view(n, 2, 8), "indexer.q_layernorm", at)
    raw = index[:, 16:]
    out = torch.zeros(n, 6, d)
    for t in range(n):
        complete = (t + 1) // size
        scores = []
        for b in range(complete):
            mean = raw[b * size : (b + 1) * size].mean(0)[None, None]
            key = normed(mean, "indexer.k_layernorm", torch.tensor([b * size]))[0, 0]
            scores.append(sum(max(0.0, float(index_q[t, h] @ key)) for h in range(2)) / math.sqrt(8))
        best = sorted(range(complete), key=lambda b: (-scores[b], b))[: SPEC.index_topk]
        read = sorted([b * size + i for b in best for i in range(size)] + list(range(complete * size, t + 1)))
        for head in range(6):
            weights = torch.softmax(k[read, head // 2] @ q[t, head] / math.sqrt(d), 0)
            out[t, head] = (weights @ v[read, head // 2]) * torch.sigmoid(gate[t, head])
    return out.flatten(1) @ w["o_proj"].T


@pytest.fixture(scope="module")
def u() -> torch.Tensor:
    return torch.randn(61, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(u) -> torch.Tensor:
    return naive(u)


@pytest.mark.parametrize("cuts", [[61], [1] * 61, [7] * 8 + [5], [13, 1, 1, 46], [14, 47], [15, 46], [60, 1]])
def test_every_cut_equals_the_definition(u, expected, cuts):
    torch.testing.assert_close(run(block(), u, cuts), expected, atol=2e-6, rtol=1e-5)


def test_rows_do_not_see_what_follows(u):
    changed = u.clone()
    changed[40:] += 1
    assert torch.equal(run(block(), u, [61])[:40], run(block(), changed, [61])[:40])


def test_slices_change_nothing_and_bound_memory(u, expected, monkeypatch):
    seen: dict[str, int] = {"scores": 0, "gathered": 0, "mask": 0}
    plain_top, plain_attention = indexer_module.top_lowest, attention_module.F.scaled_dot_product_attention

    def top(scores: torch.Tensor, k: int) -> torch.Tensor:
        seen["scores"] = max(seen["scores"], scores.numel() * (4 * SPEC.index_heads + 16))
        return plain_top(scores, k)

    def attend(q, k, v, attn_mask=None):
        if k.dim() == 4 and k.shape[0] == SPEC.kv_heads and q.shape[0] == SPEC.kv_heads:
            seen["gathered"] = max(seen["gathered"], k.nbytes + v.nbytes)
        elif attn_mask is not None:
            seen["mask"] = max(seen["mask"], attn_mask.shape[-2])
        return plain_attention(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(indexer_module, "top_lowest", top)
    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(indexer_module, "MOST_SCORE_BYTES", 20 * 24 * 3)
    monkeypatch.setattr(attention_module, "MOST_GATHER_BYTES", 2 * 3 * 16 * 4 * 15 * 5)
    monkeypatch.setattr(attention_module, "DENSE_QUERY_ROWS", 3)
    torch.testing.assert_close(run(block(), u, [61]), expected, atol=2e-6, rtol=1e-5)
    assert 0 < seen["scores"] <= indexer_module.MOST_SCORE_BYTES
    assert 0 < seen["gathered"] <= attention_module.MOST_GATHER_BYTES
    assert seen["mask"] == 3 * 2


def test_block_keys_do_not_depend_on_cuts(u):
    """A block that fills over several windows gets its key from all of its raw keys, once."""
    keys = []
    for cuts in ([61], random.Random(0).choices(range(1, 5), k=60)):
        state = SequenceState(SPEC.state_shape(torch.float32), 200)
        layer, first = block(), 0
        for rows in cuts:
            rows = min(rows, 61 - first)
            if rows:
                layer(
                    u[first : first + rows], prepare(Window.of_sequence([0] * rows, first, 0), {0: state}, SPEC, ROTARY)
                )
                state.length = first = first + rows
        keys.append(state.attention[0].block_keys[:20])
    torch.testing.assert_close(keys[0], keys[1], atol=1e-6, rtol=1e-5)


def test_bf16_keys_and_matrices(u, expected):
    ours = run(block(torch.bfloat16), u[:14], [9, 5], torch.bfloat16)  # dense rows: no choice that rounding could turn
    assert (ours - expected[:14]).abs().max() < 2e-2 * expected.abs().max()
