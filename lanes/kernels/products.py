"""Products of a window's few rows with a matrix: bound by reading the matrix once, so what follows can ride along.

A program takes some of the matrix's rows and reads all their columns; every row of the window is multiplied with what
was read. The input is rounded to the matrix's type, as lanes.models.ops.product does; products and sums are fp32. For
windows of more rows, and where nothing is fused, cuBLAS does the same. An input that has the matrix's type already
costs least: an element is then loaded by the thread that multiplies it.

`dots` and `tile` are for kernels with something to add to a product (stream, shared). Letters: R rows (1..4), M the
power of two over R, N rows of the matrix in one program, D columns, STEP columns at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.arithmetic import INTERPRETED

MOST_ROWS = 4
PROGRAMS = 160  # at least, where the matrix has as many rows: a few more than there are multiprocessors
_MOST_SUMS = 128  # of one thread, in registers
_MOST_INTERPRETED = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program goes through a matrix: all threads side by side along a step, 16 bytes each."""

    rows: int  # N
    step: int
    padded: int  # M
    warps: int


def tile(matrix: torch.Tensor, rows: int, *, outputs: int | None = None, warps: int | None = None) -> Tile:
    """For `outputs` results (the matrix's rows, unless several make one); warps as in another part of the launch."""
    assert 1 <= rows <= MOST_ROWS, rows
    count, columns = matrix.shape
    vector = 16 // matrix.element_size()
    if warps is None:
        warps = 4 if columns >= 4 * 32 * vector else 1
    padded = 1 << (rows - 1).bit_length()
    most = min(4 if warps == 4 else 8, _MOST_SUMS // (vector * padded))
    if INTERPRETED:  # the interpreter takes its time for each program, whatever its size
        return Tile(
            min(_MOST_INTERPRETED, triton.next_power_of_2(outputs or count)), warps * 32 * vector, padded, warps
        )
    wanted = max(1, (outputs or count) // PROGRAMS)
    return Tile(min(most, 1 << (wanted.bit_length() - 1)), warps * 32 * vector, padded, warps)


def product(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 [R, N'] = x [R, D] times matrix [N', D] transposed; rows of x and out any distance apart."""
    t = tile(matrix, x.shape[0])
    _product[(triton.cdiv(matrix.shape[0], t.rows),)](
        x, x.stride(0), matrix, out, out.stride(0), R=x.shape[0], M=t.padded, ROWS=matrix.shape[0], N=t.rows,
        D=matrix.shape[1], STEP=t.step, num_warps=t.warps, **early.options(),
    )  # fmt: skip


def two_products(
    x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, other_x: torch.Tensor, other: torch.Tensor,
    other_out: torch.Tensor,
) -> None:  # fmt: skip
    """`product` twice in one launch: x and other_x are the same numbers, each best in the type of its matrix."""
    t = tile(matrix, x.shape[0])
    o = tile(other, x.shape[0], warps=t.warps)
    _two_products[(triton.cdiv(other.shape[0], o.rows) + triton.cdiv(matrix.shape[0], t.rows),)](
        x, x.stride(0), matrix, out, out.stride(0), other_x, other_x.stride(0), other, other_out, other_out.stride(0),
        R=x.shape[0], M=t.padded, ROWS=matrix.shape[0], N=t.rows, STEP=t.step, OTHER=other.shape[0], ON=o.rows,
        OSTEP=o.step, D=matrix.shape[1], num_warps=t.warps, **early.options(),
    )  # fmt: skip


@triton.jit
def _product(
    x, x_row, matrix, out, out_row, R: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    write(out, out_row, n, dots(x, x_row, matrix, n, ROWS, R, M, D, STEP, EARLY), ROWS, R, M)


@triton.jit
def _two_products(
    x, x_row, matrix, out, out_row, other_x, other_x_row, other, other_out, other_row, R: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, OTHER: tl.constexpr, ON: tl.constexpr,
    OSTEP: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    OTHERS: tl.constexpr = (OTHER + ON - 1) // ON
    program = tl.program_id(0)
    if program < OTHERS:
        o = program * ON + tl.arange(0, ON)
        write(other_out, other_row, o, dots(other_x, other_x_row, other, o, OTHER, R, M, D, OSTEP, EARLY), OTHER, R, M)
    else:
        n = (program - OTHERS) * N + tl.arange(0, N)
        write(out, out_row, n, dots(x, x_row, matrix, n, ROWS, R, M, D, STEP, EARLY), ROWS, R, M)


@triton.jit
def write(out, out_row, n, values, ROWS: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """values [M, N] to out[r, n]."""
    m = tl.arange(0, M)
    tl.store(out + m[:, None] * out_row + n[None, :], values, mask=(m < R)[:, None] & (n < ROWS)[None, :])


@triton.jit
def dots(
    x, x_row, matrix, n, ROWS: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """fp32 [M, N]: x[r] . matrix[n]; zeros for rows that do not exist. Says `behind` once the matrix is on its way."""
    N: tl.constexpr = n.shape[0]
    m = tl.arange(0, M)
    d = tl.arange(0, STEP)[None, None, :]
    # Loaded in the shape that they are used in, so that no value changes threads before it is summed.
    w_at, w_known = matrix + n.to(tl.int64)[None, :, None] * D + d, (n < ROWS)[None, :, None]
    x_at, x_known = x + m[:, None, None] * x_row + d, (m < R)[:, None, None]
    total = tl.zeros((M, N, STEP), tl.float32)
    w = tl.load(w_at, mask=w_known & (d < D), other=0.0)  # the compiler knows d < D where the step divides D
    early.behind(EARLY)
    following = w
    for first in tl.static_range(0, D, STEP):
        if first + STEP < D:  # on its way while this step is computed
            following = tl.load(w_at + (first + STEP), mask=w_known & (d + (first + STEP) < D), other=0.0)
        value = tl.load(x_at + first, mask=x_known & (d + first < D), other=0.0)
        total += value.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        w = following
    return tl.sum(total, axis=2)
