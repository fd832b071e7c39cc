"""The attention cases of `bench.gpu_kernels`: one layer's six launches at several places of a long sequence.

Every layer has its own keys in memory for the longest context; the place is a number on the device, as it is in a lane.

Letters: T rows, A heads, D head size, K blocks chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu_cases import EPS, Case, Sizes
from lanes.kernels import attention, index, naive
from lanes.kernels.attention import Angles, AttentionShape, Kept, Norms, Partial, Queries

MOST_SWAPPED = 4  # blocks chosen here or by the twin alone: sums in another order move a score at the cut


class AttentionLayers:
    """All attention layers' keys, and one window's launches."""

    def __init__(self, sizes: Sizes, rows: int, device: str) -> None:
        self.rows = rows
        self.shape = shape = AttentionShape(
            sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.index_heads, sizes.index_dim, sizes.rotated // 2,
            sizes.block_tokens, sizes.blocks_chosen,
        )  # fmt: skip
        most = max(sizes.contexts) + 4 * shape.block_tokens
        kind = torch.bfloat16

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_()

        heads = (shape.kv_heads, most, shape.head_dim)
        self.kept = [
            Kept(
                normal(*heads, dtype=kind), normal(*heads, dtype=kind), normal(most, shape.index_dim, dtype=kind),
                normal(most // shape.block_tokens, shape.index_dim),
            )
            for _ in range(sizes.attention_layers)
        ]  # fmt: skip
        self.projected = normal(rows, shape.columns)
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.norms = Norms(
            *(1 + normal(width) * 0.1 for width in (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim))
        )
        turns = normal(2, rows, shape.rotated_pairs)
        self.angles = Angles(turns[0].cos(), turns[0].sin(), turns[1].cos(), turns[1].sin())
        self.queries = Queries(
            normal(rows, shape.heads, shape.head_dim, dtype=kind), normal(rows, shape.index_heads, shape.index_dim)
        )
        self.chosen = index.Chosen.of(rows, most // shape.block_tokens, shape.chosen, device)
        self.partial = Partial.of(shape, rows, device)
        self.out = normal(rows, shape.heads, shape.head_dim, dtype=kind)

    def prepare(self, layer: int) -> None:
        """Queries, and what is written behind the sequence."""
        attention.prepare(
            self.shape, self.projected, self.length, self.norms, self.angles, EPS, self.queries, self.kept[layer]
        )

    def choose(self, layer: int) -> None:
        """Three launches of the index."""
        keys = self.kept[layer].block_keys
        index.choose(self.queries.index, keys, self.length, self.shape.block_tokens, self.chosen)

    def attend(self, layer: int) -> None:
        """Splits."""
        attention.attend(
            self.shape, self.queries.heads, self.chosen.ids, self.length, self.kept[layer], self.partial
        )  # fmt: skip

    def merge(self, layer: int) -> None:
        """Their sum."""
        gates = attention.gates(self.shape, self.projected)
        attention.merge(self.shape, self.partial, self.length, gates, self.out)

    def all(self, layer: int) -> None:
        """Between the two products of an attention layer."""
        self.prepare(layer)
        self.choose(layer)
        self.attend(layer)
        self.merge(layer)

    def check(self) -> None:
        """Layer 0, where the sequence stands now: what it writes, the blocks, the result."""
        shape, length, kept = self.shape, int(self.length), self.kept[0]
        end = length + self.rows
        twin = Kept(
            kept.keys[:, :end].cpu(), kept.values[:, :end].cpu(), kept.raw_keys[:end].cpu(),
            kept.block_keys[: end // shape.block_tokens].cpu(),
        )  # fmt: skip
        self.out.fill_(float("nan"))
        self.all(0)
        projected = self.projected.cpu()
        norms = Norms(*(getattr(self.norms, name).cpu() for name in Norms.__slots__))
        angles = Angles(*(getattr(self.angles, name).cpu() for name in Angles.__slots__))
        q, index_q = naive.attention_inputs(shape, projected, length, norms, angles, EPS, twin)
        torch.testing.assert_close(self.queries.heads.cpu().float(), q, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(self.queries.index.cpu(), index_q, rtol=2e-5, atol=2e-5)
        for got, want in zip((kept.keys, kept.values), (twin.keys, twin.values), strict=True):
            torch.testing.assert_close(got[:, length:end].cpu(), want[:, length:], rtol=1e-2, atol=1e-3)
        blocks = end // shape.block_tokens
        torch.testing.assert_close(kept.block_keys[:blocks].cpu(), twin.block_keys, rtol=2e-2, atol=2e-2)
        twin.block_keys.copy_(kept.block_keys[:blocks])
        wanted = naive.chosen_blocks(
            self.queries.index.cpu(), twin.block_keys, length, shape.block_tokens, shape.chosen
        )  # fmt: skip
        for r, ids in enumerate(self.chosen.ids.cpu().long()):
            if (length + r + 1) // shape.block_tokens > shape.chosen:
                swapped = set(ids.tolist()) ^ set(wanted[r].tolist())
                assert len(swapped) <= MOST_SWAPPED, f"row {r}: {len(swapped)} blocks differ"
                wanted[r] = ids
        gates = attention.gates(shape, projected)
        result = naive.attention(self.queries.heads.cpu(), wanted, length, shape.block_tokens, twin, gates)
        torch.testing.assert_close(self.out.cpu().float(), result, rtol=2e-2, atol=1e-2)


def attention_cases(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """The chain at every context, and at the longest one its parts."""
    layers = AttentionLayers(sizes, rows, device)
    shape, launches = layers.shape, 3 + (0 if layers.chosen.bits.shape[1] == 0 else 1) + 2
    for context in sizes.contexts:
        layers.length.fill_(context - rows)
        blocks = context // shape.block_tokens
        scored = 4 * shape.index_dim * blocks if blocks > shape.chosen else 0
        tokens = min(context, shape.chosen * shape.block_tokens)
        read = rows * 2 * 2 * shape.kv_heads * shape.head_dim * tokens
        written = 4 * rows * shape.columns
        name = f"context {context}"
        moved = written + scored + read
        yield Case(f"attention: all, {name}", launches, moved, layers.all, layers.check, len(layers.kept))
        if context == max(sizes.contexts):
            partial = 8 * layers.partial.values.numel()
            yield Case(f"attention: prepare, {name}", 1, written, layers.prepare, layers=len(layers.kept))
            yield Case(f"attention: choose, {name}", launches - 3, scored, layers.choose, layers=len(layers.kept))
            yield Case(f"attention: attend, {name}", 1, read, layers.attend, layers=len(layers.kept))
            yield Case(f"attention: merge, {name}", 1, partial // 2, layers.merge, layers=len(layers.kept))
