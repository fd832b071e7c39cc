"""Products of a window's few rows with a matrix: bound by reading the matrix once, so what follows can ride along.

A program takes some of the matrix's rows and reads all their columns; every row of the window is multiplied with what
was read. The input is rounded to the matrix's type, as lanes.models.ops.product does; products and sums are fp32. An
input that has the matrix's type already costs least: an element is then loaded by the thread that multiplies it.

Two rows and more of a tall matrix are the tensor cores' (`tensor_dots`): eight rows cost them what one does, and sums
take no registers. One row, and matrices of too few programs, are faster by threads; else cuBLAS does the same.

`dots` and `tile` are for kernels with something to add to a product (stream, shared); `begin`, `rest` and `deep` are
the same for matrices of which all programs fit at once, where few rows leave registers for more loads.

Letters: R rows (1..4), M the power of two over R, N rows of the matrix in one program, D columns, STEP columns at a
time, SIDE rows that threads take side by side in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.arithmetic import INTERPRETED

MOST_ROWS = 4
FEW_ROWS = 2  # up to here our products are faster than the library's, and launches do more at once (bench.gpu_kernels)
PROGRAMS = 160  # at least, where the matrix has as many rows: a few more than there are multiprocessors
TALL = 4096  # rows of a matrix whose programs of tensor cores are enough for the chip
SLICES, LONGEST_STEP, STAGES = 4, 128, 3  # of tensor cores: warps, columns of a step, steps on their way with this one
TAKEN_ROWS = 8  # M of tensor cores, whatever R is
_SLICES, _STAGES, _M = tl.constexpr(SLICES), tl.constexpr(STAGES), tl.constexpr(TAKEN_ROWS)
_MOST_SUMS = 128  # of one thread, in registers
_MOST_INTERPRETED = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program goes through a matrix: all threads side by side along a step, 16 bytes each."""

    rows: int  # N
    step: int
    padded: int  # M
    warps: int
    side: int = 1  # rows that threads take side by side


def slices(matrix: torch.Tensor, rows: int) -> Tile | None:
    """How tensor cores go through it, every warp a slice of the columns, which come step by step; None where they are
    not for it: one row, a low matrix, fp32, or columns that do not divide."""
    columns, rest = divmod(matrix.shape[1], SLICES)
    step = min(LONGEST_STEP, columns & -columns)  # the greatest power of two that divides a slice
    if not 1 < rows <= MOST_ROWS or matrix.shape[0] < TALL or matrix.dtype == torch.float32 or rest or step < 16:
        return None
    return Tile(64 if INTERPRETED else 16, step, TAKEN_ROWS, SLICES)


def serves(matrix: torch.Tensor, rows: int) -> bool:
    """Whether `product` is what such a matrix and so many rows are multiplied by; else cuBLAS."""
    return (rows <= FEW_ROWS and matrix.dtype != torch.float32) or slices(matrix, rows) is not None


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


def deep(matrix: torch.Tensor, rows: int, *, outputs: int | None = None) -> Tile:
    """For `begin` and `rest`, of few rows: steps that divide the columns where they can, rows side by side in them."""
    t = tile(matrix, rows, outputs=outputs)
    columns, step = matrix.shape[1], t.step
    while columns % step and step * t.rows > t.step and step > 8 * 16 // matrix.element_size():
        step //= 2
    side = t.step // step
    return t if columns % step else Tile(max(t.rows, side), step, t.padded, t.warps, side)


def product(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 [R, N'] = x [R, D] times matrix [N', D] transposed; rows of x and out any distance apart."""
    cut = slices(matrix, x.shape[0])
    t = cut or tile(matrix, x.shape[0])
    _product[(triton.cdiv(matrix.shape[0], t.rows),)](
        x, x.stride(0), matrix, out, out.stride(0), R=x.shape[0], M=t.padded, ROWS=matrix.shape[0], N=t.rows,
        D=matrix.shape[1], STEP=t.step, TENSOR=cut is not None, num_warps=t.warps, **early.options(),
    )  # fmt: skip


def product_into(x: torch.Tensor, matrix: torch.Tensor, injection: torch.Tensor, streams: torch.Tensor) -> None:
    """streams fp32 [R, S, N'] += injection fp32 [R, S] times the product of x [R, D] and matrix [N', D] transposed."""
    t = deep(matrix, x.shape[0])
    # With as many sums as one row has, as many programs fit at once.
    outputs = t.rows if INTERPRETED else max(t.side, t.rows // t.padded)
    _product_into[(triton.cdiv(matrix.shape[0], outputs),)](
        x, x.stride(0), matrix, injection, streams, R=x.shape[0], M=t.padded, ROWS=matrix.shape[0], N=outputs,
        D=matrix.shape[1], STEP=t.step, SIDE=t.side, S=streams.shape[1], num_warps=t.warps, **early.options(),
    )  # fmt: skip


def two_products(
    x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, other_x: torch.Tensor, other: torch.Tensor,
    other_out: torch.Tensor,
) -> None:  # fmt: skip
    """`product` twice in one launch: x and other_x are the same numbers, each best in the type of its matrix."""
    cut = slices(matrix, x.shape[0])
    t = cut or tile(matrix, x.shape[0])
    o = tile(other, x.shape[0], warps=t.warps)
    _two_products[(triton.cdiv(other.shape[0], o.rows) + triton.cdiv(matrix.shape[0], t.rows),)](
        x, x.stride(0), matrix, out, out.stride(0), other_x, other_x.stride(0), other, other_out, other_out.stride(0),
        R=x.shape[0], M=t.padded, ROWS=matrix.shape[0], N=t.rows, STEP=t.step, OTHER=other.shape[0], OM=o.padded,
        ON=o.rows, OSTEP=o.step, D=matrix.shape[1], TENSOR=cut is not None, num_warps=t.warps, **early.options(),
    )  # fmt: skip


@triton.jit
def _product(
    x, x_row, matrix, out, out_row, R: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr, TENSOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    _multiply(x, x_row, matrix, out, out_row, n, ROWS, R, M, D, STEP, TENSOR, EARLY)


@triton.jit
def _multiply(
    x, x_row, matrix, out, out_row, n, ROWS: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, TENSOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[r, n] by `tensor_dots` or by `dots`."""
    if TENSOR:
        write(out, out_row, n, tensor_dots(x, x_row, matrix, n, ROWS, R, D, STEP, EARLY), ROWS, R, M)
    else:
        write(out, out_row, n, dots(x, x_row, matrix, n, ROWS, R, M, D, STEP, EARLY), ROWS, R, M)


@triton.jit
def _product_into(
    x, x_row, matrix, injection, streams, R: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.open_next(EARLY)
    n = tl.program_id(0) * N + tl.arange(0, N)
    w, following = begin(matrix, n, ROWS, D, STEP, SIDE)
    early.behind(EARLY)
    place, was, share = into_streams(streams, injection, n, ROWS, S, R, M)
    values = rest(x, x_row, matrix, n, w, following, ROWS, R, M, D, STEP, SIDE)
    inject(place, was, share, n, values, ROWS, S, R)


@triton.jit
def _two_products(
    x, x_row, matrix, out, out_row, other_x, other_x_row, other, other_out, other_row, R: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, OTHER: tl.constexpr, OM: tl.constexpr, ON: tl.constexpr,
    OSTEP: tl.constexpr, D: tl.constexpr, TENSOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    OTHERS: tl.constexpr = (OTHER + ON - 1) // ON
    program = tl.program_id(0)
    if program < OTHERS:
        o = program * ON + tl.arange(0, ON)
        _multiply(other_x, other_x_row, other, other_out, other_row, o, OTHER, R, OM, D, OSTEP, False, EARLY)
    else:
        n = (program - OTHERS) * N + tl.arange(0, N)
        _multiply(x, x_row, matrix, out, out_row, n, ROWS, R, M, D, STEP, TENSOR, EARLY)


@triton.constexpr_function
def _power(count):
    return 1 << (int(count) - 1).bit_length()


@triton.jit
def into_streams(x, injection, n, H: tl.constexpr, S: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """Of all streams at once, to be loaded before what enters them is known: (where x[r, s, n] is, what is there, with
    which share a result enters it), [M, streams, N] each."""
    row, s = tl.arange(0, M)[:, None, None], tl.arange(0, _power(S))[None, :, None]
    known = (row < R) & (s < S)
    place = x + (row * S + s) * H + n[None, None, :]
    was = tl.load(place, mask=known & (n < H)[None, None, :], other=0.0)
    return place, was, tl.load(injection + row * S + s, mask=known, other=0.0)


@triton.jit
def inject(place, was, share, n, values, H: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """x[r, s, n] += injection[r, s] * values [M, N], with what `into_streams` gave: of what a program's columns are,
    nobody else reads or writes."""
    row, s = tl.arange(0, was.shape[0])[:, None, None], tl.arange(0, was.shape[1])[None, :, None]
    known = (row < R) & (s < S) & (n < H)[None, None, :]
    tl.store(place, was + share * values[:, None, :], mask=known)


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


@triton.jit
def tensor_dots(
    x, x_row, matrix, n, ROWS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`dots` by tensor cores: fp32 [M, N] with M = 8. A warp has a slice of the columns; steps come by way of shared
    memory, and all rows of the matrix are sent for to the L2 cache before `behind` is said."""
    SPAN: tl.constexpr = D // _SLICES
    early.ahead(matrix, n, ROWS, D, EARLY)
    early.behind(EARLY)
    d = tl.arange(0, _SLICES)[:, None, None] * SPAN + tl.arange(0, STEP)[None, None, :]
    m = tl.arange(0, _M)[None, :, None]
    w_at, x_at = matrix + n.to(tl.int64)[None, :, None] * D + d, x + m * x_row + d
    total = tl.zeros((_SLICES, n.shape[0], _M), tl.float32)
    for first in tl.range(0, SPAN, STEP, num_stages=_STAGES):
        w = tl.load(w_at + first, mask=(n < ROWS)[None, :, None], other=0.0)  # [SLICES, N, STEP]
        value = tl.load(x_at + first, mask=m < R, other=0.0).to(w.dtype)  # [SLICES, M, STEP]
        if INTERPRETED:  # it cannot multiply bf16, whose products fp32 holds exactly
            w, value = w.to(tl.float32), value.to(tl.float32)
        total = tl.dot(w, tl.permute(value, (0, 2, 1)), total, input_precision="ieee")
    return tl.trans(tl.sum(total, axis=0))


@triton.jit
def begin(matrix, n, ROWS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr):
    """The first two steps of rows n, to be loaded before `behind` is said."""
    at, known, d = _places(matrix, n, ROWS, D, STEP, SIDE)
    w = tl.load(at, mask=known & (d < D), other=0.0)  # the compiler knows d < D where the step divides D
    following = w
    if STEP < D:
        following = tl.load(at + STEP, mask=known & (d + STEP < D), other=0.0)
    return w, following


@triton.jit
def _places(matrix, n, ROWS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr):
    """(where a step of rows n begins [SIDE, 1, N / SIDE, STEP], which exist, d)."""
    n = tl.reshape(n, (SIDE, 1, n.shape[0] // SIDE, 1))
    d = tl.arange(0, STEP)[None, None, None, :]
    return matrix + n.to(tl.int64) * D + d, n < ROWS, d


@triton.jit
def rest(
    x, x_row, matrix, n, w, following, ROWS: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """`dots` of what was begun, in which nothing is said: more steps are on their way, none of them unrolled."""
    N: tl.constexpr = n.shape[0]
    # Loaded in the shape that they are used in, so that no value changes threads before it is summed.
    w_at, w_known, d = _places(matrix, n, ROWS, D, STEP, SIDE)
    m = tl.arange(0, M)[None, :, None, None]
    x_at, x_known = x + m * x_row + d + tl.zeros((SIDE, 1, 1, 1), tl.int32), m < R
    total = tl.zeros((SIDE, M, N // SIDE, STEP), tl.float32)
    value = tl.load(x_at, mask=x_known & (d < D), other=0.0)
    for first in tl.range(0, D, STEP):
        # On its way while a step is computed, or two.
        last = tl.load(w_at + (first + 2 * STEP), mask=w_known & (d + (first + 2 * STEP) < D), other=0.0)
        coming = tl.load(x_at + (first + STEP), mask=x_known & (d + (first + STEP) < D), other=0.0)
        total += value.to(w.dtype).to(tl.float32) * w.to(tl.float32)
        w, following, value = following, last, coming
    return tl.reshape(tl.permute(tl.sum(total, axis=3), (1, 0, 2)), (M, N))
