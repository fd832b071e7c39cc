"""QSA attention: gated grouped-query attention over the blocks that an indexer chose.

    q, gate = W_q u per head;  q, k normed per head and rotated;  out = W_o (attention * sigmoid(gate))

A query with at most `index_topk` complete blocks reads everything before it: those rows attend densely. Later rows
read a gathered set of at most budget + r - 1 keys each. Both work in slices of rows of bounded memory (a slice of
gathered keys is one row where a row's keys fill it). All heads of a row read the same keys.

Letters: R rows, T rows of a run, A heads, KV key/value heads, G = A / KV, D head size, J index size, L keys,
r tokens per block, k blocks chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lanes.models.ops import FEW_ROWS, product, rms, rotate
from lanes.models.qwen4_exp.indexer import Indexer
from lanes.models.qwen4_exp.rows import Rows, Run
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import AttentionState

# Of gathered keys and values alive at once: they stay in a core's L2 cache until they are read (32 MiB: 1.6 times
# slower at 2 x 256 x 2048, twice as slow at 2 x 64 x 512).
MOST_GATHER_BYTES = 2 << 20
MOST_GATHER_BYTES_CUDA = 256 << 20  # a GPU wants few launches instead
SLICE_ROWS = 2048  # of a long window through a reader at once: their projection is larger than their streams
DENSE_QUERY_ROWS = 256  # rows per slice of dense attention: bounds its mask

# What stands between a layer's two products in this module's place, for rows of one sequence: from the projection fp32
# [R, columns] to attention times sigmoid(gate) [R, A * D]; writes what the rows add to the state.
Reader = Callable[["Attention", torch.Tensor, Rows], torch.Tensor]


class Attention:
    """One layer's QSA attention."""

    def __init__(self, spec: Spec, weights: Weights, layer: int) -> None:
        self._spec, self.layer = spec, layer
        heads, keys = 2 * spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        index = (spec.index_heads + 1) * spec.index_dim
        parts = (("q_proj", heads), ("k_proj", keys), ("v_proj", keys))
        self.inputs = weights.matrix(
            *((f"{name}.weight", rows) for name, rows in parts),
            ("indexer.index_qk_proj.weight", index),
            columns=spec.hidden,
        )
        self.output = weights.matrix(("o_proj.weight", spec.hidden), columns=spec.heads * spec.head_dim)
        self.input_bias = self.output_bias = None
        if spec.attention_bias:
            bias = weights.bias([(f"{name}.bias", rows) for name, rows in parts])
            self.input_bias = F.pad(bias, (0, index))
            self.output_bias = weights.vector("o_proj.bias", spec.hidden)
        self.norm_q = 1.0 + weights.vector("q_norm.weight", spec.head_dim)
        self.norm_k = 1.0 + weights.vector("k_norm.weight", spec.head_dim)
        self.indexer = Indexer(spec, weights.under("indexer"))
        self.reader: Reader | None = None
        self.split = (heads, keys, keys, spec.index_heads * spec.index_dim, spec.index_dim)

    def __call__(self, u: torch.Tensor, rows: Rows) -> torch.Tensor:
        """u, result: fp32 [R, H]."""
        spec = self._spec
        if self.reader is not None and len(rows.runs) == 1 and not rows.runs[0].state.attention[self.layer].shape.int8:
            some_rows = rows.parts(SLICE_ROWS, spec.index_block_tokens)
            return torch.cat([self._out(self.reader(self, self._projected(u[part]), some)) for part, some in some_rows])
        wide, k, v, index_q, raw_keys = self._projected(u).split(self.split, dim=1)
        q, gate = wide.unflatten(1, (spec.heads, 2, spec.head_dim)).unbind(2)  # [R, A, D] each
        cos, sin = (x[:, None] for x in rows.rotation)
        q = rotate(rms(q, spec.eps) * self.norm_q, cos, sin)
        k = rotate(rms(k.unflatten(1, (-1, spec.head_dim)), spec.eps) * self.norm_k, cos, sin)
        v = v.unflatten(1, (-1, spec.head_dim))
        index_q = self.indexer.queries(index_q, rows.rotation)
        parts = []
        for run in rows.runs:
            state, part = run.state.attention[self.layer], run.rows
            self._write(state, run, k[part], v[part], raw_keys[part])
            parts.append(self._read(q[part], gate[part], index_q[part], state, run.start))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._out(out.flatten(1))

    def _projected(self, u: torch.Tensor) -> torch.Tensor:
        """[R, columns]"""
        projected = product(u, self.inputs)
        return projected if self.input_bias is None else projected.add_(self.input_bias)

    def _out(self, attended: torch.Tensor) -> torch.Tensor:
        """[R, H] of [R, A * D]"""
        result = product(attended, self.output)
        return result if self.output_bias is None else result + self.output_bias

    def remember(self, u: torch.Tensor, rows: Rows) -> None:
        """The rows' keys and values alone: for rows that nobody asks anything. u: fp32 [R, H]."""
        first, last = self.split[0], self.split[0] + 2 * self.split[1]
        projected = product(u, self.inputs[first:last])
        if self.input_bias is not None:
            projected += self.input_bias[first:last]
        k, v = (x.unflatten(1, (-1, self._spec.head_dim)) for x in projected.chunk(2, dim=1))
        cos, sin = (x[:, None] for x in rows.rotation)
        k = rotate(rms(k, self._spec.eps) * self.norm_k, cos, sin)
        raw_keys = product(u, self.inputs[-self._spec.index_dim :])
        for run in rows.runs:
            self._write(run.state.attention[self.layer], run, k[run.rows], v[run.rows], raw_keys[run.rows])

    def _write(self, state: AttentionState, run: Run, k: torch.Tensor, v: torch.Tensor, raw_keys: torch.Tensor) -> None:
        """k, v: [T, KV, D]; raw_keys: [T, J]."""
        state.put(run.start, run.stop, k.transpose(0, 1), v.transpose(0, 1))
        state.raw_index_keys[run.start : run.stop] = raw_keys
        self.indexer.complete_blocks(state, run)

    def _read(
        self, q: torch.Tensor, gate: torch.Tensor, index_q: torch.Tensor, state: AttentionState, start: int
    ) -> torch.Tensor:
        """The reader of every device."""
        spec, out = self._spec, torch.empty_like(q, memory_format=torch.contiguous_format)
        dense = min(spec.dense_rows(start), q.shape[0])
        q = q.to(state.shape.dtype).unflatten(1, (spec.kv_heads, -1))  # [T, KV, G, D]
        # Of a few rows each on its own: beside others, and masked, its sums have other last bits.
        slice_rows = 1 if q.shape[0] <= FEW_ROWS and not q.is_cuda else DENSE_QUERY_ROWS
        for first in range(0, dense, slice_rows):
            part = slice(first, min(first + slice_rows, dense))
            out[part] = self._dense(q[part], state, start + part.start)
        if dense < q.shape[0]:
            positions = torch.arange(start + dense, start + q.shape[0], device=q.device)
            chosen = self.indexer.choose(index_q[dense:], start + dense, state)
            per_row = 2 * spec.kv_heads * spec.head_dim * state.shape.dtype.itemsize
            most = MOST_GATHER_BYTES_CUDA if q.is_cuda else MOST_GATHER_BYTES
            step = max(1, most // (per_row * (spec.index_budget_tokens + spec.index_block_tokens)))
            for first in range(0, positions.shape[0], step):
                part = slice(first, first + step)
                rows = slice(dense + first, min(dense + first + step, q.shape[0]))
                out[rows] = self._gathered(q[rows], chosen[part], positions[part], state)
        return out.mul_(gate.sigmoid())

    def _dense(self, q: torch.Tensor, state: AttentionState, start: int) -> torch.Tensor:
        """Rows [T, KV, G, D] from position `start` on, over everything before them: fp32 [T, A, D]."""
        rows, groups = q.shape[0], q.shape[2]
        length = start + rows
        mask = None
        if rows > 1:
            mask = torch.ones((rows, length), dtype=torch.bool, device=q.device).tril(start)
            mask = mask[None].expand(groups, -1, -1).reshape(1, 1, groups * rows, length)
        keys, values = state.read(slice(0, length))
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3).flatten(1, 2)[None],  # [1, KV, G * T, D]
            keys[None],
            values[None],
            attn_mask=mask,
        )
        heads = out.view(-1, groups, rows, out.shape[-1])  # [KV, G, T, D]
        return heads.permute(2, 0, 1, 3).flatten(1, 2).float()

    def _gathered(
        self, q: torch.Tensor, chosen: torch.Tensor, positions: torch.Tensor, state: AttentionState
    ) -> torch.Tensor:
        """Rows [T, KV, G, D] over their chosen blocks [T, k] and the tokens of the open block: fp32 [T, A, D]."""
        size = self._spec.index_block_tokens
        inside = torch.arange(size, device=q.device)
        tokens = (chosen[:, :, None] * size + inside).flatten(1)  # [T, k * r]
        open_tokens = ((positions + 1) // size * size)[:, None] + inside[:-1]  # [T, r - 1], some past the query
        tokens = torch.cat((tokens, open_tokens), dim=1)
        visible = tokens <= positions[:, None]
        tokens = torch.where(visible, tokens, 0).flatten()
        keys, values = (x.unflatten(1, (q.shape[0], -1)) for x in state.read(tokens))  # [KV, T, L, D]
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible[None, :, None])
        return out.transpose(0, 1).flatten(1, 2).float()  # [T, A, D]
