"""Kernels of windows with few large programs, for one test: of the interpreter's time most goes into their number."""

from __future__ import annotations

import pytest

from bench.gpu_lane_rig import wide_tiles
from lanes.kernels import experts, mixing, products
from shared_experts.layout import RecordLayout

TILES = [
    (experts, "GATE_TILE"), (experts, "DOWN_TILE"), (products, "PROGRAMS"), (mixing, "LOWER_ROWS"),
    (mixing, "LIFT_ROWS"),
]  # fmt: skip


def widened(monkeypatch: pytest.MonkeyPatch, layout: RecordLayout) -> None:
    """From here on, and as they were afterwards."""
    for module, name in TILES:
        monkeypatch.setattr(module, name, getattr(module, name))
    wide_tiles(layout)
