"""Expert records with random or hostile contents, placed where a test wants them."""

from __future__ import annotations

import numpy as np

from shared_experts.layout import EXPERT_FORMATS, RecordLayout


def aligned(size_bytes: int) -> np.ndarray:
    """Zeroed bytes on a multiple of 64."""
    raw = np.zeros(size_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes]


def fill(record: np.ndarray, layout: RecordLayout, rng: np.random.Generator, *, hostile: bool = False) -> None:
    """Random weights in place; hostile: fp16 scales of any bit pattern, fp32 weights of any magnitude,
    int8 codes at their ends and the -128 that no converter writes."""
    h, i, group = layout.hidden, layout.intermediate, layout.format.group

    def part(offset: int, count: int, dtype: type) -> np.ndarray:
        return record[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    if not group:
        for offset, count in ((layout.gate_up_codes, 2 * i * h), (layout.down_codes, h * i)):
            w = rng.standard_normal(count) * 0.1
            part(offset, count, np.float32)[:] = w * 10.0 ** rng.integers(-30, 8, count) if hostile else w
        return
    for offset, elements in ((layout.gate_up_codes, 2 * i * h), (layout.down_codes, h * i)):
        count = elements * layout.format.bits // 8
        codes = part(offset, count, np.uint8)
        codes[:] = np.frombuffer(rng.bytes(count), np.uint8)
        if layout.format.bits == 8:
            signed = codes.view(np.int8)
            signed[signed == -128] = 127
            if hostile:
                least = rng.choice([3, 100, 126])  # few or many codes go to an end
                signed[signed >= least] = rng.choice([127, -128])
                signed[signed <= -least] = rng.choice([-127, -128])
    for offset, count in ((layout.gate_up_scales, 2 * i * h // group), (layout.down_scales, h * i // group)):
        if hostile:
            bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
            # Mostly finite, subnormals among them: one infinity would make every answer NaN.
            keep = rng.random(count) < 0.002
            part(offset, count, np.uint16)[:] = np.where(keep, bits, bits & 0xA3FF)
        else:
            part(offset, count, np.float16)[:] = rng.standard_normal(count) * 0.02


def records(layout: RecordLayout, count: int, rng: np.random.Generator, *, hostile: bool = False) -> list[np.ndarray]:
    """Separate records with random contents."""
    made = [aligned(layout.record_bytes) for _ in range(count)]
    for record in made:
        fill(record, layout, rng, hostile=hostile)
    return made


def addresses(of: list[np.ndarray]) -> np.ndarray:
    """Where they lie: uint64."""
    return np.array([record.ctypes.data for record in of], np.uint64)


def random_layout(rng: np.random.Generator, name: str, groups: int = 12) -> RecordLayout:
    """Sizes of 1 to `groups` groups each way; f32: any small numbers."""
    unit = EXPERT_FORMATS[name].group
    h, i = (int(n) for n in rng.integers(1, groups + 1, 2)) if unit else (int(n) for n in rng.integers(1, 70, 2))
    return RecordLayout.of(EXPERT_FORMATS[name], h * (unit or 1), i * (unit or 1))


def activations(rows: int, hidden: int, rng: np.random.Generator, *, hostile: bool = False) -> np.ndarray:
    """fp32 [rows, hidden]; hostile: magnitudes from subnormal to near overflow, runs of 0, -0, rarely NaN or Inf."""
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    if not hostile:
        return x
    with np.errstate(all="ignore"):
        x *= np.float32(10) ** rng.integers(-44, 38, (rows, 1)).astype(np.float32)
        x *= np.float32(2) ** rng.integers(-20, 3, x.shape).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = -0.0
    x[:, : hidden // 3][rng.random(rows) < 0.3] = 0
    for value in (np.nan, np.inf, -np.inf):
        if rng.random() < 0.1:
            x[rng.integers(rows), rng.integers(hidden)] = value
    return x


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns, every NaN as the same one: its payload is not part of the arithmetic."""
    return np.where(np.isnan(values), np.int32(0x7FC00000), values.view(np.int32))
