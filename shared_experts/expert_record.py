"""One expert to the bytes of its record and back, as `layout` places them.

Not here: the codes themselves (`codecs`, `quantiser`). Invariant: bytes that belong to no part are zero, so equal
weights give equal records.

Letters: H hidden, I intermediate, G group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared_experts.codecs import CodesArray, F16Array, F32Array, U8Array, dequantise_q4, dequantise_q8
from shared_experts.layout import RecordLayout

Quantise = Callable[[F32Array, int], tuple[CodesArray, F16Array]]  # quantise_q4 or quantise_q8, slow or fast


def encode_expert(layout: RecordLayout, gate_up: F32Array, down: F32Array, quantise: Quantise | None) -> U8Array:
    """The record of gate_up [2I, H] and down [H, I]; ValueError where a weight cannot be written."""
    record = np.zeros(layout.record_bytes, np.uint8)
    for matrix, weights in enumerate((gate_up, down)):
        encode_rows(layout, record, matrix, 0, weights, quantise)
    return record


def encode_rows(
    layout: RecordLayout, record: U8Array, matrix: int, first: int, weights: F32Array, quantise: Quantise | None
) -> None:
    """Puts rows from `first` of a matrix (0: gate_up, 1: down) into a record; ValueError as above."""
    columns = layout.intermediate if matrix else layout.hidden
    codes_at = layout.down_codes if matrix else layout.gate_up_codes
    codes_at += first * columns * layout.format.bits // 8
    if not layout.format.group:
        _put(record, codes_at, weights.astype("<f4", copy=False))
        return
    assert quantise is not None, "formats with codes need a quantiser"
    codes, scales = quantise(weights, layout.format.group)
    _put(record, codes_at, codes)
    scales_at = layout.down_scales if matrix else layout.gate_up_scales
    _put(record, scales_at + 2 * first * (columns // layout.format.group), scales.astype("<f2", copy=False))


def decode_expert(layout: RecordLayout, record: U8Array) -> tuple[F32Array, F32Array]:
    """(gate_up [2I, H], down [H, I]) that a record stands for, in fp32."""
    hidden, inner, group = layout.hidden, layout.intermediate, layout.format.group
    parts: list[F32Array] = []
    for rows, columns, codes_at, scales_at in (
        (2 * inner, hidden, layout.gate_up_codes, layout.gate_up_scales),
        (hidden, inner, layout.down_codes, layout.down_scales),
    ):
        size = rows * columns * layout.format.bits // 8
        codes = record[codes_at : codes_at + size]
        if not group:
            parts.append(codes.view("<f4").reshape(rows, columns).astype(np.float32))
            continue
        scales = record[scales_at : scales_at + 2 * rows * (columns // group)].view("<f2").reshape(rows, -1)
        if layout.format.bits == 8:
            parts.append(dequantise_q8(codes.view(np.int8).reshape(rows, columns), scales, group))
        else:
            parts.append(dequantise_q4(codes.reshape(rows, columns // 2), scales, group))
    return parts[0], parts[1]


def _put(record: U8Array, offset: int, values: F32Array | CodesArray | F16Array) -> None:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    record[offset : offset + len(data)] = data
