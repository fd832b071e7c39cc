"""Where every byte of an expert lies: the record of one (layer, expert) and the region that holds all of them.

This file is the only place where offsets are written down; the native kernel receives them from here.
Invariant: a record means the same bytes in `experts.bin`, in the shared region and in a lane's cache.

Record (formats q4g64, q4g32; every part starts on a multiple of 64 bytes, the record on a multiple of 4 KiB):

    gate_up codes   [2I rows, H/2 bytes]   rows 0..I-1 gate, I..2I-1 up
    down codes      [H rows, I/2 bytes]
    gate_up scales  fp16 [2I, H/G]
    down scales     fp16 [H, I/G]

    In each group of G elements, byte j holds element j in its low nibble and element j + G/2 in its high one.
    value = (nibble - 8) * scale

Record (format q8, G = 64): the same parts in the same order, with codes int8 [2I, H] and [H, I] in plain element order;
value = code * scale.

Record (format f32): gate_up fp32 [2I, H], then down fp32 [H, I]; no scales.

Region: one 4 KiB header page, then the records in (layer, expert) order, exactly as in `experts.bin`.

    offset  size  field           offset  size  field
    0       8     magic           96      8     record_bytes
    8       4     layout_version  104     4     format id
    12      4     header_bytes    108     4     hidden
    16      8     total_bytes     112     4     intermediate
    24      16    generation      116     4     reserved (0)
    40      32    fingerprint     120     4     CRC-32 of bytes 0..119
    72      4     owner_pid       124     4     reserved (0)
    76      4     reserved (0)    128     8     state word, written last: READY or 0
    80      8     owner start time in clock ticks since boot (field 22 of /proc/<pid>/stat)
    88      4     layers (the draft layer, if any, is the last)
    92      4     experts per layer

Letters: H hidden size, I intermediate size, G group size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

RECORD_ALIGNMENT_BYTES = 4096
PART_ALIGNMENT_BYTES = 64
REGION_HEADER_BYTES = 4096
REGION_MAGIC = b"XPWYREGN"
REGION_LAYOUT_VERSION = 1
REGION_READY = 0x5945_4152_4E4F_4947
REGION_HEADER = struct.Struct("<8sIIQ16s32sIIQIIQIIIIII")
REGION_STATE_OFFSET = 128
assert REGION_HEADER.size == 128


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """How the values of an expert are written: `bits` per code, `group` elements per scale (0: none)."""

    name: str
    id: int
    bits: int
    group: int


F32 = ExpertFormat("f32", 1, 32, 0)
Q4G64 = ExpertFormat("q4g64", 2, 4, 64)
Q4G32 = ExpertFormat("q4g32", 3, 4, 32)
Q8 = ExpertFormat("q8", 4, 8, 64)
EXPERT_FORMATS = {f.name: f for f in (F32, Q4G64, Q4G32, Q8)}
DEFAULT_EXPERT_FORMAT = Q4G64


def align(n: int, to: int) -> int:
    """The least multiple of `to` that is not below `n`."""
    return (n + to - 1) // to * to


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Byte offsets of the parts of one expert record; `RecordLayout.of` computes them.

    Raises ValueError where the sizes do not fit the format's group.
    """

    format: ExpertFormat
    hidden: int
    intermediate: int
    gate_up_codes: int
    down_codes: int
    gate_up_scales: int
    down_scales: int
    record_bytes: int

    @classmethod
    def of(cls, format: ExpertFormat, hidden: int, intermediate: int) -> RecordLayout:
        """The layout of a (hidden, intermediate) expert in `format`."""
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if size < 1:
                raise ValueError(f"{name} size {size} is not positive")
            if format.group and size % format.group:
                raise ValueError(f"{name} size {size} is not a multiple of {format.name}'s group of {format.group}")
        gate_up_bytes = 2 * intermediate * hidden * format.bits // 8
        down_bytes = hidden * intermediate * format.bits // 8
        down_codes = align(gate_up_bytes, PART_ALIGNMENT_BYTES)
        gate_up_scales = align(down_codes + down_bytes, PART_ALIGNMENT_BYTES)
        if not format.group:
            end = down_scales = gate_up_scales
        else:
            down_scales = align(gate_up_scales + 4 * intermediate * (hidden // format.group), PART_ALIGNMENT_BYTES)
            end = down_scales + 2 * hidden * (intermediate // format.group)
        return cls(
            format, hidden, intermediate, 0, down_codes, gate_up_scales, down_scales,
            align(end, RECORD_ALIGNMENT_BYTES),
        )  # fmt: skip


def record_offset(layer: int, expert: int, experts: int, record_bytes: int) -> int:
    """Byte offset of a record in `experts.bin`; add REGION_HEADER_BYTES for the region."""
    return (layer * experts + expert) * record_bytes
