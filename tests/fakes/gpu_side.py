"""The GPU of the CPU share's handshake, played by the test's own thread: it rings, waits and reads as a graph would."""

from __future__ import annotations

import time

import numpy as np

from lanes.experts.share import RELEASED, CpuShare


class GpuSide:
    """Views of one block."""

    def __init__(self, share: CpuShare, memory: np.ndarray, rows: int, chosen: int, hidden: int) -> None:
        at = share.block
        self.doorbell, self.done = (memory[o : o + 8].view(np.uint64) for o in (at.doorbell, at.done))
        self.layer, self.rows = (memory[o : o + 4].view(np.int32) for o in (at.layer, at.rows))
        self.ids = memory[at.ids : at.ids + 4 * rows * chosen].view(np.int32)
        self.x = memory[at.x : at.x + 4 * rows * hidden].view(np.float32)
        self.y = memory[at.y : at.y + 4 * rows * chosen * hidden].view(np.float32).reshape(-1, hidden)
        self._share = share

    def ring(self, n: int, layer: int, ids: np.ndarray, x: np.ndarray) -> None:
        """Inputs, then the word."""
        self.layer[0], self.rows[0] = layer, len(ids)
        self.ids[: ids.size] = ids.reshape(-1)
        self.x[: x.size] = x.reshape(-1)
        self.y[:] = np.nan
        self.doorbell[0] = n

    def wait(self, n: int, limit_s: float = 60.0) -> bool:
        """Whether the n-th layer was answered; False when the share let go instead."""
        until = time.monotonic() + limit_s
        while self.done[0] < n:
            assert time.monotonic() < until, "neither answered nor released"
            time.sleep(0)
        return int(self.done[0]) != RELEASED
