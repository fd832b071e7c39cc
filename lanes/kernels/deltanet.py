"""One decode window of a Gated DeltaNet layer in three launches: convolution and norms, the delta rule, the gated norm.

State lags one window behind, so that rejected drafts need no copy to go back to. A window first replays the rows of the
window before that were accepted (`accepted`, a number on the device, 0..R), writes the state that results, and goes on
through its own rows without writing. What a replay needs is kept on the device; nothing is read back by the host.

    prepare   columns = the last taps - 1 before the window, then its rows;  silu(conv), q and k normalised per head,
              decay exp(g), beta; moves tail and pending rows on
    rule      S <- exp(g) S;  S <- S + k (x) beta (v - S^T k);  o = S^T q      replay, store, then the window's rows
    finish    rms(o) * w * gate(z)

Not here: products with matrices. fp32 throughout; sums run in another order than on the CPU: equal to rounding.

Letters: R rows (1..4), T taps, N value heads, A key heads, K key size, V value size, C channels (2AK + NV).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.models.qwen4_exp.deltanet import L2_EPS

# Of the state in one program: 32 columns of 128 keys are 16 KiB; 48 heads of 128 columns are 192 programs, more than
# there are multiprocessors, and two loads of 16 bytes a thread in each of four steps are in flight.
COLUMNS = 32


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one layer; K and V are powers of two."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows ready for the rule: mixed [4, C] (q, k, v behind convolution and norm), decay and beta [4, N], all fp32."""

    mixed: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def prepare(
    shape: DeltaShape, qkv: torch.Tensor, ba: torch.Tensor, taps: torch.Tensor, rate: torch.Tensor,
    shift: torch.Tensor, tail: torch.Tensor, accepted: torch.Tensor, raw: torch.Tensor, pending: DeltaRows,
    replay: DeltaRows,
) -> None:  # fmt: skip
    """The window's rows from qkv fp32 [R, C] (rows at any stride) and ba fp32 [R, 2N] (b then a) into `pending`; its
    rows go to `replay`.

    taps [T, C]; rate (-exp(A_log)) and shift [N]; tail [T - 1, C] moves past the `accepted` (int32 [1]) rows of the
    window before, whose inputs raw [4, C] holds until this window's replace them. `replay` is scratch that the layers
    of a model can share.
    """
    heads = 2 * shape.key_heads + shape.value_heads
    _prepare[(heads + 1,)](
        qkv, qkv.stride(0), ba, taps, rate, shift, tail, accepted, raw, pending.mixed, pending.decay, pending.beta,
        replay.mixed, replay.decay, replay.beta, R=qkv.shape[0], BEFORE=raw.shape[0], TAPS=shape.taps,
        A=shape.key_heads, N=shape.value_heads, NP=triton.next_power_of_2(shape.value_heads), K=shape.key_dim,
        V=shape.value_dim, C=shape.channels, EPS=L2_EPS, num_warps=1, **early.options(),
    )  # fmt: skip


def rule(
    shape: DeltaShape, state: torch.Tensor, accepted: torch.Tensor, replay: DeltaRows, pending: DeltaRows,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """out fp32 [R, N, V]; state fp32 [N, K, V] gains the accepted rows of `replay`, in place."""
    columns = min(COLUMNS, shape.value_dim)
    _rule[(shape.value_dim // columns, shape.value_heads)](
        state, accepted, replay.mixed, replay.decay, replay.beta, pending.mixed, pending.decay, pending.beta, out,
        R=out.shape[0], BEFORE=replay.mixed.shape[0], A=shape.key_heads, N=shape.value_heads, K=shape.key_dim,
        V=shape.value_dim, C=shape.channels, COLUMNS=columns, num_warps=4, **early.options(),
    )  # fmt: skip


def finish(
    out: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, result: torch.Tensor, eps: float, *, silu: bool
) -> None:
    """result [R, N * V] of any float type = rms(out [R, N, V]) * norm [V] * gate(z [R, N * V], rows at any stride)."""
    rows, heads, value = out.shape
    _finish[(heads, rows)](
        out, z, z.stride(0), norm, result, eps, N=heads, V=value, SILU=silu, num_warps=1, **early.options()
    )  # fmt: skip


@triton.jit
def _prepare(
    qkv, stride, ba, taps, rate, shift, tail, accepted, raw, mixed, decay, beta, old_mixed, old_decay, old_beta,
    R: tl.constexpr, BEFORE: tl.constexpr, TAPS: tl.constexpr, A: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # A program reads and moves its own channels only, so what it overwrites nobody else needs. Everything is loaded
    # before anything is stored: a load behind a store waits for it. What the last window left comes before our turn.
    head = tl.program_id(0)
    count = tl.load(accepted)
    if head < 2 * A + N:
        # Heads of either kind have a program each; the smaller ones leave some of its channels out.
        D: tl.constexpr = K if K > V else V
        at = tl.where(head < 2 * A, head * K, 2 * A * K + (head - 2 * A) * V) + tl.arange(0, D)
        own = tl.arange(0, D) < tl.where(head < 2 * A, K, V)
        tap, old, history, rows = (), (), (), ()
        for t in tl.static_range(TAPS):
            tap = tap + (tl.load(taps + t * C + at, mask=own, other=0.0),)
        for t in tl.static_range(TAPS - 1):
            history = history + (tl.load(tail + t * C + at, mask=own, other=0.0),)
        for r in tl.static_range(BEFORE):
            history = history + (tl.load(raw + r * C + at, mask=own, other=0.0),)
        for r in tl.static_range(BEFORE):
            old = old + (tl.load(mixed + r * C + at, mask=own),)
        # Before the window come the last one's accepted rows, then the tail.
        for t in tl.static_range(TAPS - 1):
            row = history[t]
            for r in tl.static_range(1, BEFORE + 1):
                row = tl.where(count == r, history[t + r], row)
            rows = rows + (row,)
        early.behind(EARLY)
        for r in tl.static_range(R):
            rows = rows + (tl.load(qkv + r * stride + at, mask=own, other=0.0),)
        for r in tl.static_range(BEFORE):
            tl.store(old_mixed + r * C + at, old[r], mask=own)
        for r in tl.static_range(R):
            total = rows[r] * tap[0]
            for t in tl.static_range(1, TAPS):
                total += rows[r + t] * tap[t]
            total = total / (1.0 + tl.exp(-total))  # 0 stays 0
            if head < 2 * A:
                total *= tl.rsqrt(tl.sum(total * total, axis=0) + EPS)
            if head < A:
                total *= K**-0.5
            tl.store(mixed + r * C + at, total, mask=own)
        for t in tl.static_range(TAPS - 1):
            tl.store(tail + t * C + at, rows[t], mask=own)
        for r in tl.static_range(R):
            tl.store(raw + r * C + at, rows[TAPS - 1 + r], mask=own)
    else:
        n = tl.arange(0, NP)
        known = n < N
        old_d, old_b = (), ()
        for r in tl.static_range(BEFORE):
            old_d = old_d + (tl.load(decay + r * N + n, mask=known),)
            old_b = old_b + (tl.load(beta + r * N + n, mask=known),)
        head_rate, head_shift = tl.load(rate + n, mask=known, other=0.0), tl.load(shift + n, mask=known, other=0.0)
        early.behind(EARLY)
        b, a = (), ()
        for r in tl.static_range(R):
            b = b + (tl.load(ba + r * 2 * N + n, mask=known, other=0.0),)
            a = a + (tl.load(ba + r * 2 * N + N + n, mask=known, other=0.0) + head_shift,)
        for r in tl.static_range(BEFORE):
            tl.store(old_decay + r * N + n, old_d[r], mask=known)
            tl.store(old_beta + r * N + n, old_b[r], mask=known)
        for r in tl.static_range(R):
            softplus = tl.where(a[r] > 20.0, a[r], tl.log(1.0 + tl.exp(tl.minimum(a[r], 20.0))))
            tl.store(decay + r * N + n, tl.exp(head_rate * softplus), mask=known)
            tl.store(beta + r * N + n, 1.0 / (1.0 + tl.exp(-b[r])), mask=known)


@triton.jit
def _rule(
    state, accepted, before_mixed, before_decay, before_beta, mixed, decay, beta, out, R: tl.constexpr,
    BEFORE: tl.constexpr, A: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    keys = head // (N // A) * K + tl.arange(0, K)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    values = 2 * A * K + head * V + column
    place = state + head * (K * V) + tl.arange(0, K)[:, None] * V + column[None, :]
    s = tl.load(place)  # [K, COLUMNS]: of no other launch of the window
    early.behind(EARLY)
    count = tl.load(accepted)
    for r in tl.static_range(BEFORE):
        if r < count:
            k = tl.load(before_mixed + r * C + A * K + keys)
            s *= tl.load(before_decay + r * N + head)
            wrong = tl.load(before_mixed + r * C + values) - tl.sum(s * k[:, None], axis=0)
            s += k[:, None] * (tl.load(before_beta + r * N + head) * wrong)[None, :]
    tl.store(place, s)
    for r in tl.static_range(R):
        k = tl.load(mixed + r * C + A * K + keys)
        q = tl.load(mixed + r * C + keys)
        s *= tl.load(decay + r * N + head)
        wrong = tl.load(mixed + r * C + values) - tl.sum(s * k[:, None], axis=0)
        s += k[:, None] * (tl.load(beta + r * N + head) * wrong)[None, :]
        tl.store(out + (r * N + head) * V + column, tl.sum(s * q[:, None], axis=0))


@triton.jit
def _finish(
    out, z, stride, norm, result, eps, N: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    early.behind(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, V)
    o = tl.load(out + (row * N + head) * V + v)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / V + eps)
    gate = tl.load(z + row * stride + head * V + v)
    gate = (gate if SILU else 1.0) / (1.0 + tl.exp(-gate))
    tl.store(result + (row * N + head) * V + v, o * tl.load(norm + v) * gate)
