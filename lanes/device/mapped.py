"""A matrix of the lane's own in host memory, where kernels read a row of it in place.

Not here: the shared region (pin), memory for copies (arena). Invariant: what was registered for a matrix is so for as
long as the matrix lives, and no longer: other memory may come to lie there.
"""

from __future__ import annotations

import weakref

import torch

from lanes.device.pin import PAGE_BYTES
from lanes.device.registered import Registered
from shared_experts.layout import align

# The allocator gives more than this pages of their own, which nothing else of the process can lie in, or register.
COPIED_BYTES = 32 << 20


def mapped(matrix: torch.Tensor, registered: Registered | None = None) -> torch.Tensor | None:
    """The matrix as kernels on this thread's device read it: itself, or a copy of a small one; None where the driver
    refuses."""
    if matrix.nbytes <= COPIED_BYTES:
        return matrix.pin_memory()
    registered = registered or Registered()
    first = matrix.data_ptr() // PAGE_BYTES * PAGE_BYTES
    end = align(matrix.data_ptr() + matrix.nbytes, PAGE_BYTES)
    if not registered.add(first, end - first, mapped=True):
        return None
    weakref.finalize(matrix, registered.drop, first).atexit = False
    return matrix
