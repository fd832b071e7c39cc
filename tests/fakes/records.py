"""Expert records in plain memory, in place of a region: random but sane values in any format."""

from __future__ import annotations

import numpy as np

from shared_experts.layout import EXPERT_FORMATS, RecordLayout, align
from shared_experts.manifest import ExpertsInfo


class FakeRegion:
    """Answers `record_address` like an attached region; `record` gives the bytes."""

    def __init__(self, format: str, hidden: int, intermediate: int, layers: int, experts: int, seed: int = 0) -> None:
        layout = RecordLayout.of(EXPERT_FORMATS[format], hidden, intermediate)
        self.layout, self.experts = layout, experts
        self.info = ExpertsInfo(format, hidden, intermediate, layers, 0, experts, layout.record_bytes)
        rng = np.random.default_rng(seed)
        count = layers * experts
        raw = np.zeros(count * layout.record_bytes + 4096, np.uint8)
        start = align(raw.ctypes.data, 4096) - raw.ctypes.data
        self._bytes = raw[start : start + count * layout.record_bytes].reshape(count, layout.record_bytes)
        for record in self._bytes:
            if format == "f32":
                weights = 3 * intermediate * hidden
                record[: 4 * weights] = rng.normal(0, 0.2, weights).astype(np.float32).view(np.uint8)
                continue
            record[: layout.gate_up_scales] = rng.integers(0, 256, layout.gate_up_scales)
            scales = (layout.record_bytes - layout.gate_up_scales) // 2
            record[layout.gate_up_scales :] = rng.uniform(0.001, 0.05, scales).astype(np.float16).view(np.uint8)

    def record_address(self, layer: int, expert: int) -> int:
        return self._bytes[layer * self.experts + expert].ctypes.data

    def record(self, layer: int, expert: int) -> bytes:
        return self._bytes[layer * self.experts + expert].tobytes()
