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
from lanes.kernels.arithmetic import INTERPRETED, fma
from lanes.kernels.products import dots, tile, write


def enter(
    u: torch.Tensor, router: torch.Tensor, logits: torch.Tensor, rounded: torch.Tensor, gate_up: torch.Tensor,
    h: torch.Tensor,
) -> None:  # fmt: skip
    """logits fp32 [R, E + 1] = u fp32 [R, H] times router fp32 [E + 1, H], and h [R, I] (any float) = silu(gate) * up.

    `rounded` is u in the type of gate_up [2I, H].
    """
    rows, inner = u.shape[0], gate_up.shape[0] // 2
    t = tile(gate_up, rows, outputs=inner)
    r = tile(router, rows, warps=t.warps)
    _enter[(triton.cdiv(router.shape[0], r.rows) + triton.cdiv(inner, t.rows),)](
        u, router, logits, rounded, gate_up, h, R=rows, M=t.padded, ROUTED=router.shape[0], RN=r.rows, RSTEP=r.step,
        I=inner, N=t.rows, STEP=t.step, D=u.shape[1], num_warps=t.warps, **early.options(),
    )  # fmt: skip


def leave(
    h: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, weights: torch.Tensor, y: torch.Tensor,
    y_cpu: torch.Tensor, slots: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """out fp32 [R, H] = combine of weights, y, y_cpu and slots, + sigmoid(gate) * (h [R, I] times down [H, I]).

    gate fp32 [R], elements any distance apart: the last column of the router's logits.
    """
    rows, chosen = weights.shape
    hidden, inner = down.shape
    t = tile(down, rows)
    # Every routed expert's rows are on their way at once: more of them than two of several rows spill.
    outputs = t.rows if rows == 1 or INTERPRETED else min(t.rows, 2)
    _leave[(triton.cdiv(hidden, outputs),)](
        h, down, gate, gate.stride(0), weights, y, y_cpu, slots, out, R=rows, M=t.padded, K=chosen, H=hidden, N=outputs,
        D=inner, STEP=t.step, num_warps=t.warps, enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


@triton.jit
def _enter(
    u, router, logits, rounded, gate_up, h, R: tl.constexpr, M: tl.constexpr, ROUTED: tl.constexpr, RN: tl.constexpr,
    RSTEP: tl.constexpr, I: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ROUTERS: tl.constexpr = (ROUTED + RN - 1) // RN
    program = tl.program_id(0)
    if program < ROUTERS:
        e = program * RN + tl.arange(0, RN)
        write(logits, ROUTED, e, dots(u, D, router, e, ROUTED, R, M, D, RSTEP, EARLY), ROUTED, R, M)
    else:
        n = (program - ROUTERS) * N + tl.arange(0, N)
        gate = dots(rounded, D, gate_up, n, I, R, M, D, STEP, EARLY)
        up = dots(rounded, D, gate_up + I * D, n, I, R, M, D, STEP, EARLY)
        write(h, I, n, gate / (1.0 + tl.exp(-gate)) * up, I, R, M)


@triton.jit
def _leave(
    h, down, gates, gate_row, weights, y, y_cpu, slots, out, R: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.arange(0, M)
    row = (m < R)[:, None] & (n < H)[None, :]
    shared = dots(h, D, down, n, H, R, M, D, STEP, EARLY)
    total = tl.zeros((M, N), tl.float32)
    for k in tl.static_range(K):
        pair = m * K + k
        slot = tl.load(slots + pair, mask=m < R, other=-1)
        here, at = (slot < 0)[:, None], n[None, :]
        a = tl.load(y + pair[:, None] * H + at, mask=row & here, other=0.0)
        b = tl.load(y_cpu + slot[:, None] * H + at, mask=row & (here == 0), other=0.0)
        weight = tl.load(weights + pair, mask=m < R, other=0.0)[:, None] + tl.zeros((M, N), tl.float32)
        total = fma(weight, tl.where(here, a, b), total)
    gate = tl.load(gates + m * gate_row, mask=m < R, other=0.0)
    total += shared / (1.0 + tl.exp(-gate))[:, None]
    write(out, H, n, total, H, R, M)
