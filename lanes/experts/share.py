"""The CPU's share of a GPU lane's expert misses (lanes/native/share.h) behind ctypes: a thread, a block of words.

Not here: the GPU's side, which rings the doorbell and says what is whose (split).

Invariant: an error stays. Once `check` has raised, the GPU's waits are released, its window is void, the lane ends.

Letters: L layers, E experts per layer, R rows of a window at most, K experts per row, P = R * K pairs, H hidden.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanes.errors import HandshakeLost
from lanes.experts.native import ExpertKernel, NativePool, check_array

IDLE, ARMED, STOPPED = 0, 1, 2
RELEASED = 0x3FFFFFFF3FFFFFFF  # the done word when nobody is to wait
_abandoned: list[object] = []  # what a thread that does not get on may still touch
_REASONS = {
    STOPPED: "it was stopped",
    10: "no doorbell in time",
    11: "a doorbell out of order",
    12: "a layer, row count or expert id out of range",
    13: "its kernel ran out of memory or threads",
    14: "its thread does not get on",
}


class Block(ctypes.Structure):
    """Byte offsets of the words and rows that both sides share; drawn in share.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("doorbell", "done", "layer", "rows", "ids", "x", "y", "bytes")
    )  # fmt: skip

    doorbell: int
    done: int
    layer: int
    rows: int
    ids: int
    x: int
    y: int
    bytes: int


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "experts", "rows", "chosen")),
        ("addresses", ctypes.c_void_p),
        ("silence_ns", ctypes.c_int64),
        ("spent", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Tables:
    """What the thread reads and writes in place."""

    addresses: npt.NDArray[np.uint64]  # [L, E] of the records, in this process
    spent: npt.NDArray[np.int64]  # [P + 1, 2] written by the thread, in windows: see share.h
    times: npt.NDArray[np.int64]  # [L, 2] the same of the last window


def block_of(kernel: ExpertKernel, rows: int, chosen: int) -> Block:
    """The layout of a block for windows of up to `rows`; ValueError where rows * chosen is over 1024."""
    native, block = kernel.native(), Block()
    native.check(native.library.share_block_of(rows, chosen, kernel.layout.hidden, ctypes.byref(block)))
    return block


class CpuShare:
    """The thread; `memory` (uint8, on a multiple of 64) is the block, zeroed, and stays the caller's."""

    def __init__(
        self,
        kernel: ExpertKernel,
        tables: Tables,
        memory: npt.NDArray[np.uint8],
        rows: int,
        chosen: int,
        *,
        core: int | None = None,
        silence_s: float = 10.0,
    ) -> None:
        self._share: ctypes.c_void_p | None = None
        self.block = block_of(kernel, rows, chosen)
        self._native: NativePool = kernel.native()
        self._kept = (kernel, tables, memory)  # the thread reads and writes them
        layers, experts = tables.addresses.shape
        config = _Config(
            layers, experts, rows, chosen,
            check_array("addresses", tables.addresses, np.uint64, layers, experts),
            int(silence_s * 1e9),
            check_array("spent", tables.spent, np.int64, rows * chosen + 1, 2),
            check_array("times", tables.times, np.int64, layers, 2),
        )  # fmt: skip
        share = ctypes.c_void_p()
        self._native.check(
            self._native.library.share_create(
                self._native.pool, ctypes.byref(self._native.layout), ctypes.byref(config),
                check_array("memory", memory, np.uint8, self.block.bytes), -1 if core is None else core,
                ctypes.byref(share),
            )
        )  # fmt: skip
        self._share = share
        self._state = self._native.library.share_check

    def arm(self, layers: int) -> None:
        """A window of so many layers begins; raises HandshakeLost after an error, ValueError while one is in flight."""
        self.check()
        self._native.check(self._native.library.share_arm(self._share, layers))

    def check(self) -> bool:
        """Whether a window is in flight; raises HandshakeLost when the share has ended. Never waits."""
        state = self._state(self._share)
        if state in (IDLE, ARMED):
            return bool(state)
        raise HandshakeLost(f"the CPU's share of experts has ended: {_REASONS.get(state, f'state {state}')}")

    def close(self) -> None:
        """Ends the thread after the layer it is in, and releases a window in flight. Safe to call twice."""
        share, self._share = self._share, None
        if share is not None and self._native.library.share_destroy(share):
            _abandoned.append(self._kept)
            self._kept[0].abandon()

    def __del__(self) -> None:
        self.close()
