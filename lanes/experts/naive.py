"""The slow, plain twin of every expert source: values are written out in fp32 and multiplied by torch.

For tests and for quality figures. It shares no arithmetic with the kernels: weights are exact, activations are not
quantised, so what it yields differs from theirs by the activations' rounding. Not here: speed, memory bounds.

Letters: R rows, H hidden, I intermediate, G group, K experts per row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shared_experts.layout import ExpertFormat, RecordLayout

Record = Callable[[int, int], bytes | memoryview]  # (layer, expert) to the record's bytes


class NaiveExperts:
    """Implements `lanes.experts.protocol.Experts`."""

    def __init__(self, layout: RecordLayout, record: Record) -> None:
        self._layout, self._record = layout, record

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        """Nothing to prepare."""

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One expert after another, in ascending id."""
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, place = (ids == expert).nonzero(as_tuple=True)
            gate_up, down = (torch.from_numpy(v) for v in decode(self._layout, self._record(layer, expert)))
            gate, up = F.linear(x[rows], gate_up).chunk(2, dim=1)
            out.index_add_(0, rows, F.linear(F.silu(gate) * up, down) * weights[rows, place, None])
        return out


def decode(layout: RecordLayout, record: bytes | memoryview) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(gate_up [2I, H], down [H, I]) of one record, in fp32."""
    inner, hidden = layout.intermediate, layout.hidden
    parts = (
        (2 * inner, hidden, layout.gate_up_codes, layout.gate_up_scales),
        (hidden, inner, layout.down_codes, layout.down_scales),
    )
    gate_up, down = (_values(layout.format, record, *part) for part in parts)
    return gate_up, down


def _values(
    format: ExpertFormat, record: bytes | memoryview, rows: int, columns: int, codes_at: int, scales_at: int
) -> npt.NDArray[np.float32]:
    group = format.group
    if not group:
        return np.frombuffer(record, np.float32, rows * columns, codes_at).reshape(rows, columns).copy()
    scales = np.frombuffer(record, np.float16, rows * columns // group, scales_at).reshape(rows, -1, 1)
    if format.bits == 8:
        whole = np.frombuffer(record, np.int8, rows * columns, codes_at).reshape(rows, -1, group).astype(np.float32)
        return (whole * scales.astype(np.float32)).reshape(rows, columns)
    codes = np.frombuffer(record, np.uint8, rows * columns // 2, codes_at).reshape(rows, -1, group // 2)
    nibbles = np.concatenate((codes & 15, codes >> 4), axis=2).astype(np.float32) - 8
    return (nibbles * scales.astype(np.float32)).reshape(rows, columns)
