"""Cases of the products with something fused to them, against the model's own operations."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lanes.kernels import mixing, naive, products, shared, stream
from lanes.models.ops import rms

NOT_A_NUMBER = float("nan")


def _random(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def _matrix(rng: np.random.Generator, rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
    return (_random(rng, rows, columns) * columns**-0.5).to(kind)


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Input rounded to the matrix's type, sums in fp32; lanes.models.ops.product rounds a bf16 result once more."""
    return F.linear(x.to(matrix.dtype).float(), matrix.float())


def _empty(device: str, *size: int) -> torch.Tensor:
    return torch.full(size, NOT_A_NUMBER, device=device)


def _rounded(device: str, *values: torch.Tensor) -> list[torch.Tensor]:
    """What bf16 holds exactly in the interpreter, which cuts off where a GPU rounds."""
    return [x.bfloat16().float() if device == "cpu" else x for x in values]


def check_products(device: str, kind: torch.dtype, rows: int, columns: int, sizes: tuple[int, int]) -> None:
    """One matrix and two, into wider rows; nothing beside them is written."""
    rng = np.random.default_rng(columns + rows)
    (x,) = _rounded(device, _random(rng, rows, columns + 3))
    x = x[:, :columns]
    matrix, other = _matrix(rng, sizes[0], columns, kind), _matrix(rng, sizes[1], columns, torch.float32)
    there, out, second = x.to(device), _empty(device, rows, sizes[0] + 2), _empty(device, rows, sizes[1])
    both = _empty(device, rows, sizes[0])
    products.product(there, matrix.to(device), out[:, : sizes[0]])
    products.two_products(there, matrix.to(device), both, there, other.to(device), second)
    assert out[:, sizes[0] :].isnan().all()
    assert torch.equal(both, out[:, : sizes[0]])
    torch.testing.assert_close(both.cpu(), product(x, matrix), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.cpu(), product(x, other), rtol=1e-4, atol=1e-5)


def check_lower_and_lift(
    device: str, kind: torch.dtype, rows: int, streams: int, hidden: int, lowrank: int, *, injects: bool = True
) -> None:
    """A hyper-connection's two products, as the model's Mixer computes them."""
    rng = np.random.default_rng(hidden + rows)
    normed = _random(rng, rows, streams, hidden)
    down = _matrix(rng, lowrank + streams * injects, streams * hidden, kind)
    up = _matrix(rng, streams * hidden, lowrank, kind)
    (rounded,) = _rounded(device, normed)
    squashed, injection = _empty(device, rows, lowrank), _empty(device, rows, streams)
    stream.lower(rounded.to(device), down.to(device), squashed, injection)
    low = product(rounded.flatten(1), down) / streams
    torch.testing.assert_close(squashed.cpu(), F.silu(low[:, :lowrank]), rtol=1e-4, atol=1e-5)
    if injects:
        torch.testing.assert_close(injection.cpu(), 2 * torch.sigmoid(low[:, lowrank:]), rtol=1e-4, atol=1e-5)
    else:
        assert injection.isnan().all()
    (squashed,) = _rounded(device, squashed)
    u, u_rounded = _empty(device, rows, hidden), _empty(device, rows, hidden).bfloat16()
    stream.lift(squashed, up.to(device), normed.to(device), u, u_rounded)
    want = (product(squashed.cpu(), up).sigmoid().view_as(normed) * normed).mean(1)
    torch.testing.assert_close(u.cpu(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(u_rounded.cpu().float(), want, rtol=2e-2, atol=1e-3)


def _cast(device: str, x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """x as a kernel rounds it to `kind`, in fp32."""
    if device == "cpu" and kind == torch.bfloat16:
        return (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return x.to(kind).float()


def check_product_into(device: str, kind: torch.dtype, rows: int, columns: int, hidden: int, streams: int) -> None:
    """A block's result into the streams."""
    rng = np.random.default_rng(columns + rows)
    (x,) = _rounded(device, _random(rng, rows, columns))
    matrix, injection = _matrix(rng, hidden, columns, kind), _random(rng, rows, streams)
    before = _random(rng, rows, streams, hidden)
    got = before.clone().to(device)
    products.product_into(x.to(device), matrix.to(device), injection.to(device), got)
    want = before + injection[:, :, None] * product(x, matrix)[:, None, :]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def check_hyper_connection(
    device: str, kind: torch.dtype, rows: int, streams: int, hidden: int, lowrank: int, *, injects: bool = True
) -> None:
    """As the model's Mixer computes it; the streams stay as they are."""
    rng = np.random.default_rng(hidden + rows)
    x, norm = _random(rng, rows, streams, hidden), _random(rng, streams, hidden)
    down = _matrix(rng, lowrank + streams * injects, streams * hidden, kind)
    up = _matrix(rng, streams * hidden, lowrank, kind)
    there, injection = x.to(device), _empty(device, rows, streams)
    low, scale = _empty(device, rows, streams, lowrank + streams), _empty(device, rows, streams)
    mixing.lower(there, norm.to(device), down.to(device), low, scale, 1e-6)
    normed = rms(x, 1e-6) * norm
    want = product(_cast(device, normed, kind).flatten(1), down) / streams
    tolerance = 1e-4 if kind == torch.float32 else 4e-3  # a last bit of fp32 can be one of bf16
    got = low[:, :, : down.shape[0]].mean(1)
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    u, u_rounded = _empty(device, rows, hidden), _empty(device, rows, hidden).bfloat16()
    mixing.lift(low, up.to(device), there, scale, norm.to(device), injection, u, u_rounded, injects=injects)
    if injects:
        torch.testing.assert_close(injection.cpu(), 2 * got[:, lowrank:].sigmoid().cpu(), rtol=1e-4, atol=1e-5)
    else:
        assert injection.isnan().all()
    squashed = _cast(device, F.silu(got[:, :lowrank].cpu()), kind)
    want = (product(squashed, up).sigmoid().view_as(normed) * normed).mean(1)
    torch.testing.assert_close(u.cpu(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(u_rounded.cpu().float(), u.cpu(), rtol=2e-2, atol=1e-3)
    assert torch.equal(there.cpu(), x)


def check_shared(device: str, kind: torch.dtype, rows: int, hidden: int, inner: int, experts: int, chosen: int) -> None:
    """Router and shared expert as lanes.models.qwen4_exp.moe has them; routed experts come from both sources."""
    rng = np.random.default_rng(inner + rows)
    (u,) = _rounded(device, _random(rng, rows, hidden))
    router = _matrix(rng, experts + 1, hidden, torch.float32)
    gate_up, down = _matrix(rng, 2 * inner, hidden, kind), _matrix(rng, hidden, inner, kind)
    logits, h = _empty(device, rows, experts + 1), _empty(device, rows, inner)
    there = u.to(device)
    shared.enter(there, router.to(device), logits, there.to(kind), gate_up.to(device), h)
    gate, up = product(u, gate_up).chunk(2, dim=1)
    torch.testing.assert_close(logits.cpu(), product(u, router), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.cpu(), F.silu(gate) * up, rtol=1e-4, atol=1e-5)

    (h,) = _rounded(device, h)
    pairs = rows * chosen
    y, weights = _random(rng, pairs, hidden), _random(rng, rows, chosen)
    slots = torch.from_numpy(np.where(rng.random(pairs) < 0.5, rng.permutation(pairs), -1)).to(torch.int32)
    added = torch.empty(rows, hidden)
    naive.combine(weights, y, added)
    resident, other = y.clone(), torch.full(y.shape, NOT_A_NUMBER)
    resident[slots >= 0] = NOT_A_NUMBER
    other[slots[slots >= 0].long()] = y[slots >= 0]
    routed = [t.to(device) for t in (weights, resident, other, slots)]
    out = _empty(device, rows, hidden)
    shared.leave(h, down.to(device), logits[:, -1], *routed, out)
    want = added + logits[:, -1:].cpu().sigmoid() * product(h.cpu(), down)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)
    shut = torch.full((rows,), float("-inf"), device=device)  # the shared expert's gate: what is left is every bit
    shared.leave(h, down.to(device), shut, *routed, out)
    assert torch.equal(out.cpu(), added)
    x, injection = _random(rng, rows, 3, hidden), _random(rng, rows, 3)
    got = x.clone().to(device)
    shared.leave(h, down.to(device), logits[:, -1], *routed, got, injection.to(device))
    torch.testing.assert_close(got.cpu(), x + injection[:, :, None] * want[:, None, :], rtol=1e-4, atol=1e-5)
