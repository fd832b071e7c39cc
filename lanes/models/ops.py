"""The few operations that several blocks share.

Every activation between operations is fp32. A product rounds its input to the type of the matrix and returns fp32, so a
bf16 model computes in bf16 only inside products; with fp32 matrices nothing is rounded.

On a CPU a row of up to FEW_ROWS comes out of `product` and `alike` with the same bits whatever rows are beside it, so
that drafts change no bit of what a decode window says (fp32 matrices). torch takes another path, and another order of
sums, for one row, for two, for four.

Letters: R rows, N outputs, G groups, D group size, C channels, T taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from lanes import limits
from lanes.models.few import few_rows

FEW_ROWS = limits.MAX_WINDOW_TOKENS
Upload = Callable[[torch.Tensor, torch.device], torch.Tensor]  # as `upload`
_VECTOR = 32  # elements that elementwise loops take at once, at most; what is left of a tensor has other last bits


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [R, D] times matrix [N, D] transposed: fp32 [R, N]. Sums are never rounded to the matrix's type."""
    if matrix.is_cuda and matrix.dtype != torch.float32:
        return torch.mm(x.to(matrix.dtype), matrix.t(), out_dtype=torch.float32)
    if 0 < x.shape[0] <= FEW_ROWS and matrix.device.type == "cpu":
        return few_rows(x.to(matrix.dtype).float(), matrix.float())
    return F.linear(x.to(matrix.dtype).float(), matrix.float())


def alike(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) element by element for x [R, N] of any N, contiguous: on a CPU, rows are made of whole vectors."""
    if x.is_cuda or x.shape[0] > FEW_ROWS:
        return function(x)
    columns = x.shape[1]
    return function(F.pad(x, (0, -columns % _VECTOR)))[:, :columns]


def chosen_rows(table: torch.Tensor, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """table[ids] in host memory: where it goes to a GPU, pinned at once."""
    if device.type != "cuda":
        return table[ids]
    found = torch.empty((len(ids), *table.shape[1:]), dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, ids, out=found)


def upload(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows of host memory on the device. To a GPU through pinned memory: neither does the host wait, nor does the
    driver cut them into pieces, each of which would wait for the records that are on the link."""
    if device.type != "cuda":
        return rows.to(device)
    return (rows if rows.is_pinned() else rows.pin_memory()).to(device, non_blocking=True)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over the root mean square of its last dimension; no weight."""
    return F.rms_norm(x, x.shape[-1:], None, eps)


def causal_conv(columns: torch.Tensor, taps: Sequence[torch.Tensor], dilation: int = 1) -> torch.Tensor:
    """Depthwise convolution of rows: out[r] = sum over t of taps[t] * columns[r + t * dilation].

    columns: [R + (T - 1) * dilation, C], the earlier rows first; taps: T of [C]; out: [R, C]. The sum runs in ascending
    t whatever R is, so a row's result does not depend on how a prompt was cut.
    """
    rows = columns.shape[0] - (len(taps) - 1) * dilation
    out = columns[:rows] * taps[0]
    for t in range(1, len(taps)):
        out.addcmul_(columns[t * dilation : t * dilation + rows], taps[t])
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of the first 2·P dimensions, in halves: pairs are (i, i + P).

    x: [..., D]; cos, sin: [..., P], broadcast over heads.
    """
    pairs = cos.shape[-1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]), dim=-1)


def top_lowest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k greatest of non-negative fp32 scores [..., n], ascending; equal scores: the lowest index wins.

    Library top-k leaves ties open, and ties are common here: scores are sums of rectified products, often exactly
    zero. Score and index become one integer key, so no two are equal. Non-negative floats order as their bits do; + 0.0
    turns -0.0 into +0.0. NaN ranks above everything.
    """
    index = torch.arange(scores.shape[-1], device=scores.device)
    keys = ((scores + 0.0).view(torch.int32).to(torch.int64) << 32) - index
    return keys.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
