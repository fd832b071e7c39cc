"""Cases of the expert kernels, run by the interpreter's tests and by those on a GPU: every bit of the naive twins."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from lanes.experts import reference
from lanes.kernels import arithmetic, combine, experts, naive
from lanes.kernels.ahead import Ahead
from lanes.kernels.rows import Jobs, QuantisedRows
from lanes.models.qwen4_exp.gpu.ahead import pieces
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from tests.fakes import expert_records as made

RATHER_NOT_A_NUMBER = float("nan")


def jobs_of(ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert [J], pairs [J, R]) of every row's ascending ids, as route makes them."""
    rows, chosen = len(ids), len(ids[0])
    expert = torch.full((rows * chosen,), -1, dtype=torch.int32)
    pairs = torch.full((rows * chosen, rows), -1, dtype=torch.int32)
    for job, id in enumerate(sorted({e for row in ids for e in row})):
        expert[job] = id
        for r, row in enumerate(ids):
            if id in row:
                pairs[job, r] = r * chosen + row.index(id)
    return expert, pairs


def check_experts(
    device: str, format: str, hidden: int, inner: int, ids: list[list[int]], *, seed: int = 0, hostile: bool = False,
    skipped: frozenset[int] = frozenset(), ahead: bool = False,
) -> None:  # fmt: skip
    """Both launches against the twin; `skipped` jobs are taken by somebody else and must be left alone. With `ahead`
    gate-up sends for a matrix meanwhile."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout.of(EXPERT_FORMATS[format], hidden, inner)
    rows, pairs_count = len(ids), len(ids) * len(ids[0])
    count = max(e for row in ids for e in row) + 1
    records = torch.zeros((count, layout.record_bytes), dtype=torch.uint8)
    for record in records.numpy():
        made.fill(record, layout, rng, hostile=hostile)
    x = torch.from_numpy(made.activations(rows, hidden, rng, hostile=hostile))
    expert, pairs = jobs_of(ids)
    for job in skipped:
        expert[job] = -1

    def addresses(of: torch.Tensor) -> torch.Tensor:
        return of.data_ptr() + torch.arange(count, dtype=torch.int64) * layout.record_bytes

    want = torch.full((pairs_count, hidden), RATHER_NOT_A_NUMBER)
    naive.experts(layout, addresses(records), expert, pairs, x, want)

    records = records.to(device)
    quantised, between = (
        QuantisedRows.room(lines, width, layout.format.group, device)
        for lines, width in ((rows, hidden), (pairs_count, inner))
    )
    jobs = Jobs(expert.to(device), pairs.to(device))
    h = torch.full((pairs_count, inner), RATHER_NOT_A_NUMBER, device=device)
    y = torch.full((pairs_count, hidden), RATHER_NOT_A_NUMBER, device=device)
    table = addresses(records).to(device)
    with np.errstate(all="ignore"):
        experts.quantise_rows(x.to(device), quantised, layout.format.group)
        other = torch.zeros((64, hidden), device=device)
        plan = pieces(other, other.nbytes)
        assert plan is not None
        sent = Ahead(plan, torch.zeros(count, dtype=torch.int8, device=device)) if ahead else None
        experts.gate_up(layout, table, jobs, quantised, h, ahead=sent)
        experts.quantise_rows(h, between, layout.format.group)
        experts.down(layout, table, jobs, between, y)
    same = made.bits(y.cpu().numpy()) == made.bits(want.numpy())
    assert same.all(), f"{(~same).sum()} of {same.size} elements differ"


def check_combine(device: str, rows: int, chosen: int, hidden: int, seed: int = 0) -> None:
    """Experts from both sources, and cancellation that a changed order or a second rounding would show."""
    rng = np.random.default_rng(seed)
    y = rng.standard_normal((rows * chosen, hidden)).astype(np.float32)
    y *= np.float32(10) ** rng.integers(-6, 7, y.shape).astype(np.float32)
    weights = torch.from_numpy(rng.standard_normal((rows, chosen)).astype(np.float32))
    slots = torch.from_numpy(np.where(rng.random(rows * chosen) < 0.5, rng.permutation(rows * chosen), -1))
    slots = slots.to(torch.int32)
    want = torch.empty((rows, hidden))
    naive.combine(weights, torch.from_numpy(y), want)
    resident, other = torch.from_numpy(y.copy()), torch.full(y.shape, RATHER_NOT_A_NUMBER)
    resident[slots >= 0] = RATHER_NOT_A_NUMBER
    other[slots[slots >= 0].long()] = torch.from_numpy(y)[slots >= 0]
    out = torch.full((rows, hidden), RATHER_NOT_A_NUMBER, device=device)
    combine.combine(*(t.to(device) for t in (weights, resident, other, slots)), out)
    assert torch.equal(out.cpu(), want)


@triton.jit
def _arithmetic(a, b, c, fused, exponential, gated, n: tl.constexpr):
    at = tl.arange(0, n)
    x, y, z = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    tl.store(fused + at, arithmetic.fma(x, y, z))
    tl.store(exponential + at, arithmetic.exponential(x))
    tl.store(gated + at, arithmetic.gate(x, y))


def check_arithmetic(device: str, seed: int = 0) -> None:
    """fma, exponential and gate over all magnitudes, ties and what is not finite."""
    rng = np.random.default_rng(seed)
    size = 4096
    a, b = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    near = slice(0, size // 2)
    with np.errstate(all="ignore"):
        c = -(a * b)  # what is left is the product's rounding error
        c *= np.float32(1) + rng.integers(-3, 4, size).astype(np.float32) * np.float32(2**-23)
        c[near] *= np.float32(2) ** rng.integers(-60, 60, size // 2).astype(np.float32)
        a[near] *= np.float32(2) ** rng.integers(-140, 120, size // 2).astype(np.float32)
    a[-400:] = rng.uniform(-90, 90, 400).astype(np.float32)
    a[-8:] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 88.5, -87.5, 2**-140]
    with np.errstate(all="ignore"):
        wants = reference.fma(a, b, c), reference.exp(a), reference.gate(a, b)
    got = [torch.empty(size, device=device) for _ in wants]
    with np.errstate(all="ignore"):
        _arithmetic[(1,)](
            *(torch.from_numpy(v).to(device) for v in (a, b, c)), *got, n=size, num_warps=4, enable_fp_fusion=False
        )
    for name, want, out in zip(("fma", "exponential", "gate"), wants, got, strict=True):
        same = made.bits(out.cpu().numpy()) == made.bits(want)
        assert same.all(), (name, np.flatnonzero(~same)[:5], a[~same][:5])
