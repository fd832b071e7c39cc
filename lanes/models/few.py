"""Products of a few rows on a CPU: the native library's sums, in one order whatever the number of rows.

torch's own take another order for one row, for two, for four. Like those they run on threads of the process, as many as
torch was told to use; they are started with the first product and sleep between products.
Not here: when (lanes.models.ops). Invariant: an element depends on its row and its column of the matrix alone.

Letters: R rows, N outputs, D inputs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from lanes.errors import NativeKernelFailed
from lanes.experts.native import native_library


def few_rows(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [R, D] times matrix [N, D] transposed, all fp32 on the CPU: [R, N]; 1 to 16 rows, D up to 131,072."""
    x, matrix = x.contiguous(), matrix.contiguous()
    (rows, inputs), outputs = x.shape, matrix.shape[0]
    if x.dtype != torch.float32 or matrix.dtype != torch.float32 or matrix.shape[1] != inputs:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)}, matrix {matrix.dtype} {tuple(matrix.shape)}")
    library, pool = _pool(torch.get_num_threads())
    out = torch.empty((rows, outputs))
    code = library.expert_product(pool, rows, outputs, inputs, x.data_ptr(), matrix.data_ptr(), out.data_ptr())
    if code:
        raise NativeKernelFailed(f"native product: {library.expert_error_text(code).decode()}")
    return out


@functools.cache
def _pool(threads: int) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library, pool = native_library(), ctypes.c_void_p()
    code = library.expert_pool_create(0, None, threads, ctypes.byref(pool))
    if code:
        raise NativeKernelFailed(f"native product: {library.expert_error_text(code).decode()}")
    return library, pool
