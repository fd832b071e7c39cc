"""Cases of the attention kernels: windows of a growing sequence in poisoned memory, ties, and chunks of the index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lanes.kernels import attention, index, naive, prompt_attention
from lanes.kernels.attention import Angles, AttentionShape, Kept, Norms, Partial, Queries
from lanes.kernels.index import Chosen
from lanes.models.qwen4_exp.rows import Rotary

NOT_A_NUMBER = float("nan")
EPS = 1e-6
TINY = AttentionShape(
    heads=4, kv_heads=2, head_dim=32, index_heads=2, index_dim=16, rotated_pairs=4, block_tokens=4, chosen=3
)  # fmt: skip
TRUE = AttentionShape(
    heads=24, kv_heads=2, head_dim=256, index_heads=4, index_dim=128, rotated_pairs=32, block_tokens=4, chosen=512
)  # fmt: skip


def random(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def kept_of(shape: AttentionShape, capacity: int, kind: torch.dtype, device: str) -> Kept:
    """Memory in which every token that was not written is NaN."""
    heads = (shape.kv_heads, capacity, shape.head_dim)
    return Kept(
        *(torch.full(size, NOT_A_NUMBER, dtype=kind, device=device) for size in (heads, heads)),
        torch.full((capacity, shape.index_dim), NOT_A_NUMBER, dtype=kind, device=device),
        torch.full((capacity // shape.block_tokens, shape.index_dim), NOT_A_NUMBER, device=device),
    )


def norms_of(shape: AttentionShape, rng: np.random.Generator) -> Norms:
    sizes = (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim)
    return Norms(*(1 + 0.1 * random(rng, size) for size in sizes))


def angles_of(shape: AttentionShape, positions: torch.Tensor, theta: float = 1e7) -> Angles:
    rotary = Rotary(2 * shape.rotated_pairs, theta, torch.device("cpu"))
    return Angles(*rotary.at(positions), *rotary.at((positions - shape.block_tokens + 1).clamp(min=0)))


def moved(parts: object, device: str) -> list[torch.Tensor]:
    return [getattr(parts, name).to(device) for name in parts.__slots__]


def check_windows(
    device: str, shape: AttentionShape, capacity: int, windows: Sequence[tuple[int, int]], *,
    kind: torch.dtype = torch.float32, seed: int = 0,
) -> None:  # fmt: skip
    """(rows, accepted) of each window: all that it writes and returns; the next one writes over rejected rows."""
    rng = np.random.default_rng(seed)
    norms, twin = norms_of(shape, rng), kept_of(shape, capacity, kind, "cpu")
    ours = kept_of(shape, capacity, kind, device)
    on_device = Norms(*moved(norms, device))
    start, tolerance = 0, {"rtol": 2e-5, "atol": 2e-5} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    length = torch.zeros(1, dtype=torch.int32, device=device)
    for rows, accepted in windows:
        projected = random(rng, rows, shape.columns + 3)[:, :-3]
        angles = angles_of(shape, torch.arange(start, start + rows))
        want_q, want_index = naive.attention_inputs(shape, projected, start, norms, angles, EPS, twin)
        gates = attention.gates(shape, projected)

        queries = Queries(
            torch.full((rows, shape.heads, shape.head_dim), NOT_A_NUMBER, dtype=kind, device=device),
            torch.full((rows, shape.index_heads, shape.index_dim), NOT_A_NUMBER, device=device),
        )
        chosen = Chosen.of(rows, capacity // shape.block_tokens, shape.chosen, device)
        partial = Partial.of(shape, rows, device)
        for scratch in (chosen.scores, partial.values, partial.greatest, partial.total):
            scratch.fill_(NOT_A_NUMBER)
        result = torch.full((rows, shape.heads, shape.head_dim), NOT_A_NUMBER, device=device)
        length.fill_(start)
        there = projected.to(device)
        attention.prepare(shape, there, length, on_device, Angles(*moved(angles, device)), EPS, queries, ours)
        index.choose(queries.index, ours.block_keys, length, shape.block_tokens, chosen)
        attention.attend(shape, queries.heads, chosen.ids, length, ours, partial)
        attention.merge(shape, partial, length, attention.gates(shape, there), result)

        torch.testing.assert_close(queries.heads.cpu().float(), want_q, **tolerance)
        torch.testing.assert_close(queries.index.cpu(), want_index, rtol=2e-5, atol=2e-5)
        for name in Kept.__slots__:
            got, want = getattr(ours, name).cpu().float(), getattr(twin, name).float()
            torch.testing.assert_close(got, want, **tolerance, equal_nan=True)
        # From here on the twin reads what the kernels wrote: a key rounded the other way may choose another block.
        inputs = Kept(*moved(ours, "cpu"))
        blocks = naive.chosen_blocks(
            queries.index.cpu(), inputs.block_keys, start, shape.block_tokens, shape.chosen
        )  # fmt: skip
        for r, (ids, expected) in enumerate(zip(chosen.ids.cpu(), blocks, strict=True)):
            if (start + r + 1) // shape.block_tokens > shape.chosen:
                assert ids.tolist() == expected.tolist(), (start, r)
        want = naive.attention(queries.heads.cpu(), blocks, start, shape.block_tokens, inputs, gates)
        torch.testing.assert_close(result.cpu(), want, **tolerance)
        for name in Kept.__slots__:  # the twin goes on from the same bits
            getattr(twin, name).copy_(getattr(inputs, name))
        start += accepted


def check_choice(
    device: str, rows: int, capacity: int, length: int, chosen: int, *, seed: int = 0, zeros: float = 0.0,
    levels: int = 7, hostile: bool = False,
) -> None:  # fmt: skip
    """Blocks of small whole numbers, so that scores are exact and many are equal; `zeros` of the keys score 0."""
    rng = np.random.default_rng(seed)
    tokens, heads, size = 2, 2, 8
    keys = rng.integers(-levels, levels + 1, (capacity, size)).astype(np.float32)
    keys[rng.random(capacity) < zeros] = -1.0
    queries = rng.integers(0, 2, (rows, heads, size)).astype(np.float32)
    block_keys = torch.from_numpy(keys)
    complete = (length + rows) // tokens
    if hostile:
        block_keys[rng.integers(0, complete, 5)] = float("inf")
        block_keys[rng.integers(0, complete, 3), 0] = NOT_A_NUMBER
        queries[:] = 1.0
    block_keys[complete:] = NOT_A_NUMBER
    want = naive.chosen_blocks(torch.from_numpy(queries), block_keys, length, tokens, chosen)
    out = Chosen.of(rows, capacity, chosen, device)
    for scratch in (out.ids, out.bits, out.candidates):
        scratch.fill_(0x7FFFFFF0)
    out.scores.fill_(NOT_A_NUMBER)
    at = torch.tensor([length], device=device)
    index.choose(torch.from_numpy(queries).to(device), block_keys.to(device), at, tokens, out)
    for r in range(rows):
        if (length + r + 1) // tokens > chosen:
            assert out.ids[r].tolist() == want[r].tolist(), (length, r)


def check_long_context(device: str, rows: int, capacity: int, length: int, kind: torch.dtype = torch.bfloat16) -> None:
    """The true sizes at one place of a long sequence: results, and that they do not depend on the capacity."""
    rng = np.random.default_rng(length)
    shape, results = TRUE, []
    generator = torch.Generator(device=device).manual_seed(length)
    queries = random(rng, rows, shape.heads, shape.head_dim).to(kind)
    index_queries, gates = random(rng, rows, shape.index_heads, shape.index_dim), random(rng, *queries.shape)
    end = length + rows
    written = Kept(
        *(torch.randn((shape.kv_heads, end, shape.head_dim), device=device, generator=generator) for _ in range(2)),
        torch.zeros(0, device=device),
        torch.randn((end // shape.block_tokens, shape.index_dim), device=device, generator=generator),
    )
    at = torch.tensor([length], dtype=torch.int32, device=device)
    for room in (end, capacity):
        kept = kept_of(shape, room + -room % shape.block_tokens, kind, device)
        kept.keys[:, :end], kept.values[:, :end] = written.keys.to(kind), written.values.to(kind)
        kept.block_keys[: end // shape.block_tokens] = written.block_keys
        chosen = Chosen.of(rows, kept.block_keys.shape[0], shape.chosen, device)
        partial, result = Partial.of(shape, rows, device), torch.empty(queries.shape, device=device)
        index.choose(index_queries.to(device), kept.block_keys, at, shape.block_tokens, chosen)
        attention.attend(shape, queries.to(device), chosen.ids, at, kept, partial)
        attention.merge(shape, partial, at, gates.to(device), result)
        results.append((chosen.ids.cpu().long(), result.cpu()))
    ids, result = results[0]
    assert torch.equal(results[1][1], result)
    on_host = Kept(*moved(kept, "cpu"))
    want = naive.chosen_blocks(index_queries, on_host.block_keys, length, shape.block_tokens, shape.chosen)
    for r, expected in enumerate(want):
        if (length + r + 1) // shape.block_tokens > shape.chosen:
            assert torch.equal(results[1][0][r], ids[r])
            differ = len(set(ids[r].tolist()) ^ set(expected.tolist()))
            assert differ <= 4, f"{differ} blocks: sums in another order may swap one at the cut, not more"
            want[r] = ids[r]
    expected = naive.attention(queries, want, length, shape.block_tokens, on_host, gates)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def check_rows(
    device: str, shape: AttentionShape, start: int, rows: int, *, kind: torch.dtype = torch.float32, seed: int = 0,
) -> None:  # fmt: skip
    """A prompt's rows at some place of a sequence: the blocks chosen, and what is read; the memory behind is poison."""
    rng = np.random.default_rng(seed)
    end, size = start + rows, shape.block_tokens
    room = end + 3 * size + -end % size
    kept = kept_of(shape, room, kind, "cpu")
    heads = (shape.kv_heads, end, shape.head_dim)
    kept.keys[:, :end], kept.values[:, :end] = (random(rng, *heads).to(kind) for _ in range(2))
    kept.block_keys[: end // size] = random(rng, end // size, shape.index_dim)
    queries, gates = (random(rng, rows, shape.heads, shape.head_dim) for _ in range(2))
    index_queries = random(rng, rows, shape.index_heads, shape.index_dim)
    want_blocks = naive.chosen_blocks(index_queries, kept.block_keys, start, size, shape.chosen)
    ours = Kept(*moved(kept, device))

    dense = min(rows, max(0, (shape.chosen + 1) * size - 1 - start))
    chosen = torch.empty((0, shape.chosen), dtype=torch.int32, device=device)
    if dense < rows:
        keys = ours.block_keys[: end // size]
        products = (index_queries[dense:].to(device).flatten(0, 1) @ keys.T).unflatten(0, (-1, shape.index_heads))
        capacity = len(ours.block_keys)
        chosen = index.choose_rows(products, start + dense, size, shape.chosen, shape.index_dim, capacity)
        for r, ids in enumerate(chosen.cpu().long(), dense):
            swapped = set(ids.tolist()) ^ set(want_blocks[r].tolist())
            assert ids.tolist() == sorted(set(ids.tolist()))
            assert len(swapped) <= (4 if device == "cuda" else 0), (start + r, swapped)
            want_blocks[r] = ids
    spread = torch.full((rows, shape.heads, 2 * shape.head_dim), NOT_A_NUMBER, device=device)
    spread[:, :, shape.head_dim :] = gates.to(device)
    out = torch.full(queries.shape, NOT_A_NUMBER, dtype=kind, device=device)
    queries = queries.to(kind)
    prompt_attention.attend(
        shape, queries.to(device), chosen, start, ours.keys, ours.values, spread[:, :, shape.head_dim :], out
    )
    want = naive.attention(queries, want_blocks, start, size, kept, gates)
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if kind == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out.cpu().float(), want, **tolerance)
