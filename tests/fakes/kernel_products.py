"""Cases of the products with something fused to them, against the model's own operations."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lanes.kernels import naive, products, shared, stream

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
