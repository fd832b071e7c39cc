"""The products of `bench.gpu_kernels`: a layer's dense matrices by our kernels, and by cuBLAS with what follows apart.

Every layer has its own matrices in memory. Letters: T rows, H hidden, S streams, L low rank, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.gpu_cases import EPS, Case, Sizes
from lanes.kernels import combine, mixing, products, shared, stream
from lanes.models.ops import product, rms


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=1e-2)


def _exact(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The product in fp32 of the input rounded to the matrix's type."""
    return F.linear(x.to(matrix.dtype).float(), matrix.float())


class Matrices:
    """Random ones of every layer, kept as long as their cases."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self._layers, self._device = sizes.layers, device

    def of(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[layers, rows, columns]"""
        made = torch.empty((self._layers, rows, columns), dtype=dtype, device=self._device)
        return made.normal_(0, columns**-0.5)


def stream_products(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """A hyper-connection, of which a layer has two."""
    s, h, low_rank = sizes.streams, sizes.hidden, sizes.lowrank
    matrices = Matrices(sizes, device)
    down, up = matrices.of(low_rank + s, s * h), matrices.of(s * h, low_rank)
    x, result = torch.randn(rows, s, h, device=device), torch.randn(rows, h, device=device)
    injection, norm = torch.rand(rows, s, device=device) * 0.1, torch.rand(s, h, device=device)
    normed, u, u_rounded = torch.empty_like(x), torch.empty_like(result), result.bfloat16()
    rounded, injected = x.bfloat16(), torch.empty(rows, s, device=device)
    squashed = torch.empty((rows, low_rank), dtype=torch.bfloat16, device=device)

    def enter() -> None:
        stream.enter(x, result, injection, norm, normed, rounded, EPS)

    def lower(i: int) -> None:
        stream.lower(rounded, down[i], squashed, injected)

    def lift(i: int) -> None:
        stream.lift(squashed, up[i], normed, u, u_rounded)

    def three(i: int) -> None:
        enter()
        lower(i)
        lift(i)

    def apart(i: int) -> None:
        enter()
        low = product(rounded.flatten(1), down[i]) / s
        torch.sigmoid(low[:, low_rank:], out=injected)
        torch.mean(product(F.silu(low[:, :low_rank]), up[i]).sigmoid_().view_as(normed) * normed, 1, out=u)

    def check() -> None:
        three(0)
        n = rms(x, EPS) * norm
        low = _exact(n.flatten(1), down[0]) / s
        _close(squashed, F.silu(low[:, :low_rank]))
        _close(injected, 2 * low[:, low_rank:].sigmoid())
        _close(u, (_exact(squashed, up[0]).sigmoid().view_as(n) * n).mean(1))

    moved = 2 * (down[0].numel() + up[0].numel())
    yield Case("stream: enter, lower, lift", 3, moved, three, check)
    yield Case("stream: the same with cuBLAS", 13, moved, apart)
    yield Case("stream: lower", 1, 2 * down[0].numel(), lower)
    yield Case("stream: lift", 1, 2 * up[0].numel(), lift)
    if rows > products.FEW_ROWS:
        return
    low, scale = torch.empty(rows, s, low_rank + s, device=device), torch.empty(rows, s, device=device)

    def two(i: int) -> None:
        mixing.lower(x, norm, down[i], low, scale, EPS)
        mixing.lift(low, up[i], x, scale, norm, injected, u, u_rounded)

    def check_two() -> None:
        two(0)
        n = rms(x, EPS) * norm
        low = _exact(n.flatten(1), down[0]) / s
        _close(injected, 2 * low[:, low_rank:].sigmoid())
        _close(u, (_exact(F.silu(low[:, :low_rank]), up[0]).sigmoid().view_as(n) * n).mean(1))

    yield Case("mixing: lower, lift", 2, moved, two, check_two)


def projection_products(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """Into a DeltaNet and out of it."""
    h, value = sizes.hidden, sizes.value_heads * sizes.delta_dim
    matrices = Matrices(sizes, device)
    wide = 2 * value + 2 * sizes.key_heads * sizes.delta_dim
    inward, outward = matrices.of(wide, h), matrices.of(h, value)
    gates = matrices.of(2 * sizes.value_heads, h, torch.float32)
    u, heads = torch.randn(rows, h, device=device), torch.randn(rows, value, device=device).bfloat16()
    rounded = u.bfloat16()
    projected, gated = torch.empty(rows, wide, device=device), torch.empty(rows, 2 * sizes.value_heads, device=device)
    out = torch.empty(rows, h, device=device)

    def into(i: int) -> None:
        products.two_products(rounded, inward[i], projected, u, gates[i], gated)

    def into_cublas(i: int) -> None:
        product(rounded, inward[i])
        product(u, gates[i])

    def back(i: int) -> None:
        products.product(heads, outward[i], out)

    def check() -> None:
        into(0)
        back(0)
        _close(projected, _exact(rounded, inward[0]))
        _close(gated, _exact(u, gates[0]))
        _close(out, _exact(heads, outward[0]))

    inward_bytes = 2 * inward[0].numel() + 4 * gates[0].numel()
    yield Case("products: into a DeltaNet", 1, inward_bytes, into, check)
    yield Case("products: into a DeltaNet, cuBLAS", 3, inward_bytes, into_cublas)
    yield Case("products: out of a DeltaNet", 1, 2 * outward[0].numel(), back)
    if rows <= products.FEW_ROWS:
        injection, streams = torch.rand(rows, 4, device=device), torch.zeros(rows, 4, h, device=device)

        def into_streams(i: int) -> None:
            products.product_into(heads, outward[i], injection, streams)

        def check_streams() -> None:
            streams.zero_()
            into_streams(0)
            _close(streams, injection[:, :, None] * _exact(heads, outward[0])[:, None, :])

        yield Case("products: into the streams", 1, 2 * outward[0].numel(), into_streams, check_streams)
    yield Case(
        "products: out of a DeltaNet, cuBLAS", 2, 2 * outward[0].numel(), lambda i: product(heads, outward[i])
    )  # fmt: skip


def shared_products(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """Router and shared expert around the routed ones."""
    h, inner, pairs = sizes.hidden, sizes.inner, rows * sizes.chosen
    matrices = Matrices(sizes, device)
    router = matrices.of(sizes.experts + 1, h, torch.float32)
    gate_up, down = matrices.of(2 * inner, h), matrices.of(h, inner)
    u, y = torch.randn(rows, h, device=device), torch.randn(pairs, h, device=device)
    rounded, out = u.bfloat16(), torch.empty_like(u)
    logits = torch.empty(rows, sizes.experts + 1, device=device)
    between = torch.empty((rows, inner), dtype=torch.bfloat16, device=device)
    weights = torch.rand(rows, sizes.chosen, device=device)
    slots = torch.full((pairs,), -1, dtype=torch.int32, device=device)

    def enter(i: int) -> None:
        shared.enter(u, router[i], logits, rounded, gate_up[i], between)

    def leave(i: int) -> None:
        shared.leave(between, down[i], logits[:, -1], weights, y, y, slots, out)

    def two(i: int) -> None:
        enter(i)
        leave(i)

    def apart(i: int) -> None:
        scores = product(u, router[i])
        gate, up = product(rounded, gate_up[i]).chunk(2, dim=1)
        combine.combine(weights, y, y, slots, out)
        out.addcmul_(scores[:, -1:].sigmoid(), product(F.silu(gate) * up, down[i]))

    def check() -> None:
        two(0)
        _close(logits, _exact(u, router[0]))
        gate, up = _exact(rounded, gate_up[0]).chunk(2, dim=1)
        _close(between, F.silu(gate) * up)
        added = (weights[:, :, None] * y.view(rows, -1, h)).sum(1)
        _close(out, added + logits[:, -1:].sigmoid() * _exact(between, down[0]))

    enter_bytes = 4 * router[0].numel() + 2 * gate_up[0].numel()
    leave_bytes = 2 * down[0].numel() + 4 * (y.numel() + out.numel())
    yield Case("shared: enter, leave", 2, enter_bytes + leave_bytes, two, check)
    yield Case("shared: the same with cuBLAS", 11, enter_bytes + leave_bytes, apart)
    yield Case("shared: enter", 1, enter_bytes, enter)
    yield Case("shared: leave", 1, leave_bytes, leave)
    if rows <= products.FEW_ROWS:
        injection, streams = torch.rand(rows, 4, device=device), torch.zeros(rows, 4, h, device=device)
        yield Case(
            "shared: leave into the streams", 1, leave_bytes,
            lambda i: shared.leave(between, down[i], logits[:, -1], weights, y, y, slots, streams, injection),
        )  # fmt: skip
