"""Which rows of an n-gram table tokens name: the truth in arrays, and its native twin with arguments made once.

The twin is for the few rows of a decode window, before which nothing is in a processor's caches: there an operation of
an array takes microseconds, whatever its size. Not here: the formula in words (ngram), the rows (pack_table).

Letters: R rows, N heads of all orders.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lanes.experts.native import native_library

Ids = npt.NDArray[np.int64]


class Constants(Protocol):
    """Of a table's hash, int64 on the CPU."""

    multipliers: torch.Tensor  # [order]
    offsets: torch.Tensor  # [N]
    sizes: torch.Tensor  # [N]


class Hash(NamedTuple):
    """A table's constants as arrays: of few rows, cheaper than tensors."""

    multipliers: Ids
    sizes: Ids
    offsets: Ids

    @classmethod
    def of(cls, table: Constants) -> Hash:
        """Views."""
        return cls(table.multipliers.numpy(), table.sizes.numpy(), table.offsets.numpy())


def row_id_array(ids: Ids, eos: int, hash: Hash, heads_per_order: int) -> Ids:
    """Row ids [R, N] of the last R tokens of `ids` [order - 1 + R].

    Products stay below 2^63 because multipliers are below 2^63 / vocab, so signed arithmetic is exact.
    """
    multipliers, sizes, offsets = hash
    order = multipliers.shape[0]
    rows = ids.shape[0] - (order - 1)
    mixed = ids[order - 1 :] * multipliers[0]
    out = np.empty((rows, (order - 1) * heads_per_order), np.int64)
    passed = np.zeros(rows, np.bool_)
    for shift in range(1, order):
        seen = ids[order - 1 - shift : order - 1 - shift + rows]
        passed |= seen == eos  # what a token sees `shift` places back is eos once one is passed
        mixed = mixed ^ (np.where(passed, eos, seen) * multipliers[shift])
        heads = slice((shift - 1) * heads_per_order, shift * heads_per_order)
        out[:, heads] = mixed[:, None] % sizes[heads] + offsets[heads]
    return out


class _Hash(ctypes.Structure):
    _fields_ = (
        ("multipliers", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("eos", ctypes.c_int64),
        ("order", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    )


def bound(tokens: Ids, eos: int, hash: Hash, heads_per_order: int, out: Ids) -> Callable[[int], object]:
    """`row_id_array` as a call with R: of the first order - 1 + R tokens of `tokens`, as they are then, into out[:R].

    Raises NativeKernelUnavailable.
    """
    order, heads = len(hash.multipliers), (len(hash.multipliers) - 1) * heads_per_order
    most = len(tokens) - (order - 1)
    kept = (tokens, out, *hash)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in kept)
    assert out.shape == (most, heads)
    assert hash.sizes.shape == hash.offsets.shape == (heads,)
    assert order >= 2
    assert hash.sizes.min() >= 1
    constants = _Hash(*(array.ctypes.data for array in hash), eos, order, heads_per_order)
    call, said, at, to = _call(), ctypes.byref(constants), tokens.ctypes.data, out.ctypes.data

    def run(rows: int) -> None:
        assert rows <= most
        assert kept
        call(said, at, rows, to)

    return run


@functools.cache
def _call() -> Callable[..., Any]:
    """A microsecond's: it keeps the interpreter."""
    pointer = ctypes.c_void_p
    kind = ctypes.PYFUNCTYPE(None, pointer, pointer, ctypes.c_int32, pointer)
    return kind(("ngram_row_ids", native_library()))
