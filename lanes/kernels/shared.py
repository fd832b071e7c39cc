"""The expert that every token uses, in the launches that a layer's routed experts need anyway.

    enter    router logits (fp32) and, in other programs of the launch, silu(gate) * up of the shared expert
    leave    the routed experts added up (lanes.kernels.combine, every bit) + sigmoid(shared gate) * shared expert

Not here: routing, the routed experts. Letters: R rows, M the power of two over R, E experts, K experts per row,
P = R * K pairs, H hidden, I intermediate of the shared expert, N outputs of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.arithmetic import fma
from lanes.kernels.products import FEW_ROWS, begin, deep, dots, inject, into_streams, rest, tile, write


def enter(
    u: torch.Tensor, router: torch.Tensor, logits: torch.Tensor, rounded: torch.Tensor, gate_up: torch.Tensor,
    h: torch.Tensor,
) -> None:  # fmt: skip
    """logits fp32 [R, E + 1] = u fp32 [R, H] times router fp32 [E + 1, H], and h [R, I] (any float) = silu(gate) * up.

    `rounded` is u in the type of gate_up [2I, H].
    """
    rows, inner = u.shape[0], gate_up.shape[0] // 2
    few = rows <= FEW_ROWS
    t = (deep if few else tile)(gate_up, rows, outputs=inner)
    r = tile(router, rows, warps=t.warps)
    _enter[(triton.cdiv(router.shape[0], r.rows) + triton.cdiv(inner, t.rows),)](
        u, router, logits, rounded, gate_up, h, R=rows, M=t.padded, ROUTED=router.shape[0], RN=r.rows, RSTEP=r.step,
        I=inner, N=t.rows, STEP=t.step, SIDE=t.side, D=u.shape[1], FEW=few, num_warps=t.warps, **early.options(),
    )  # fmt: skip


def leave(
    h: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, weights: torch.Tensor, y: torch.Tensor,
    y_cpu: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, injection: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out fp32 [R, H] = combine of weights, y, y_cpu and slots, + sigmoid(gate) * (h [R, I] times down [H, I]); with
    injection fp32 [R, S], out fp32 [R, S, H] += injection times that.

    gate fp32 [R], elements any distance apart: the last column of the router's logits. What it reads before the launch
    in front has ended, all but y, y_cpu and out, must be of earlier ones.
    """
    rows, chosen = weights.shape
    hidden, inner = down.shape
    t = deep(down, 1)
    _leave[(triton.cdiv(hidden, t.rows), rows)](
        h, down, gate, gate.stride(0), weights, y, y_cpu, slots, out, out if injection is None else injection,
        K=chosen, H=hidden, N=t.rows, D=inner, STEP=t.step, SIDE=t.side,
        S=0 if injection is None else injection.shape[1], num_warps=t.warps, enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


@triton.jit
def _enter(
    u, router, logits, rounded, gate_up, h, R: tl.constexpr, M: tl.constexpr, ROUTED: tl.constexpr, RN: tl.constexpr,
    RSTEP: tl.constexpr, I: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr,
    FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ROUTERS: tl.constexpr = (ROUTED + RN - 1) // RN
    program = tl.program_id(0)
    if program < ROUTERS:
        e = program * RN + tl.arange(0, RN)
        if FEW:
            early.ahead(router, e, ROUTED, D, EARLY)
            e_w, e_following = begin(router, e, ROUTED, D, RSTEP, 1)
            early.behind(EARLY)
            value = rest(u, D, router, e, e_w, e_following, ROUTED, R, M, D, RSTEP, 1)
        else:
            value = dots(u, D, router, e, ROUTED, R, M, D, RSTEP, EARLY)
        write(logits, ROUTED, e, value, ROUTED, R, M)
    else:
        n = (program - ROUTERS) * N + tl.arange(0, N)
        up_matrix = gate_up + I * D
        if FEW:
            early.ahead(gate_up, n, I, D, EARLY)
            early.ahead(up_matrix, n, I, D, EARLY)
            w, following = begin(gate_up, n, I, D, STEP, SIDE)
            up_w, up_following = begin(up_matrix, n, I, D, STEP, SIDE)
            early.behind(EARLY)
            gate = rest(rounded, D, gate_up, n, w, following, I, R, M, D, STEP, SIDE)
            up = rest(rounded, D, up_matrix, n, up_w, up_following, I, R, M, D, STEP, SIDE)
        else:
            gate = dots(rounded, D, gate_up, n, I, R, M, D, STEP, EARLY)
            up = dots(rounded, D, up_matrix, n, I, R, M, D, STEP, EARLY)
        write(h, I, n, gate / (1.0 + tl.exp(-gate)) * up, I, R, M)


@triton.jit
def _leave(
    h, down, gates, gate_row, weights, y, y_cpu, slots, out, injection, K: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # A program has one row: the matrix is small, and what a second one reads of it lies in the cache.
    if S:
        early.open_next(EARLY)
    n = tl.program_id(0) * N + tl.arange(0, N)
    row, inside = tl.program_id(1), (n < H)[None, :]
    w, following = begin(down, n, H, D, STEP, SIDE)
    slot, weight = (), ()
    for k in tl.static_range(K):
        slot = slot + (tl.load(slots + row * K + k + tl.arange(0, 1)),)
        weight = weight + (tl.load(weights + row * K + k + tl.arange(0, 1)),)
    gate = tl.load(gates + row * gate_row)
    shared = rest(h + row * D, D, down, n, w, following, H, 1, 1, D, STEP, SIDE) / (1.0 + tl.exp(-gate))
    early.behind(EARLY)
    if S:
        place, was, share = into_streams(out + row * (S * H), injection + row * S, n, H, S, 1, 1)
    total = tl.zeros((1, N), tl.float32)
    for k in tl.static_range(K):
        here, at = (slot[k] < 0)[:, None], n[None, :]
        a = tl.load(y + (row * K + k) * H + at, mask=inside & here, other=0.0)
        b = tl.load(y_cpu + slot[k][:, None] * H + at, mask=inside & (here == 0), other=0.0)
        total = fma(weight[k][:, None] + tl.zeros((1, N), tl.float32), tl.where(here, a, b), total)
    total += shared
    if S:
        inject(place, was, share, n, total, H, S, 1)
    else:
        write(out + row * H, H, n, total, H, 1, 1)
