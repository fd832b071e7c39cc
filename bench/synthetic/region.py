"""The experts of a synthetic model, straight into sealed memory.

Records have the layout of a real pack's: codes are random, scales make an expert's output about as large as its input,
so that activations stay lively and finite. They come from one random block, read at another place and mixed with
another word for each record: faster than drawing 64 GB, and no two records are equal. Not here: which pack it is.

Invariant: the bytes depend on format, sizes and seed only, not on threads. What comes back is a region like an owner's:
sealed, read-only, with its digests.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from shared_experts import memfd
from shared_experts.fill import SealedRegion
from shared_experts.layout import REGION_HEADER_BYTES, REGION_STATE_OFFSET, RecordLayout
from shared_experts.region import GENERATION_BYTES, READY_WORD, RegionHeader, RegionShape

BLOCK_WORDS = 8 << 20  # 64 MiB: a record of 2.6 MB starts at one of millions of places in it

Words = npt.NDArray[np.uint64]


def fill(
    layout: RecordLayout,
    layers: int,
    experts: int,
    *,
    seed: int,
    threads: int,
    shaped: Callable[[tuple[bytes, ...]], RegionShape],
) -> SealedRegion:
    """The region; its descriptor is the caller's to close. `shaped` makes of the layers' digests what it is the region
    of. Raises RegionError without the memory."""  # fmt: skip
    record_bytes = layout.record_bytes
    memory = memfd.create(REGION_HEADER_BYTES + layers * experts * record_bytes)
    try:
        whole = np.frombuffer(memory.map, np.uint8)
        block = np.random.Generator(np.random.Philox(seed)).integers(
            0, 1 << 64, max(BLOCK_WORDS, record_bytes // 8), np.uint64
        )

        def one(layer: int, view: npt.NDArray[np.uint8]) -> bytes:
            digest = hashlib.sha256()
            for key in range(layer * experts, (layer + 1) * experts):
                start = REGION_HEADER_BYTES + key * record_bytes
                record = view[start : start + record_bytes]
                _record(layout, record, block, key)
                digest.update(record.data)
            return digest.digest()

        with ThreadPoolExecutor(threads) as pool:
            digests = tuple(pool.map(one, range(layers), itertools.repeat(whole)))
        header = RegionHeader.of(shaped(digests), os.urandom(GENERATION_BYTES), os.getpid())
        encoded = np.frombuffer(header.encode(), np.uint8)
        whole[: len(encoded)] = encoded
        whole[REGION_STATE_OFFSET : REGION_STATE_OFFSET + 8] = np.frombuffer(READY_WORD, np.uint8)
        del whole  # the map cannot be closed while a view of it lives
    except BaseException:
        memory.discard()
        raise
    return SealedRegion(memfd.seal(memory), header, memory.page_bytes)


def _record(layout: RecordLayout, record: npt.NDArray[np.uint8], block: Words, key: int) -> None:
    """Fills one record; every page of it is written here, by the thread that will have it near."""
    words = record.view(np.uint64)
    mixed = _mix(key)
    start = mixed % (len(block) - len(words) + 1)
    np.bitwise_xor(block[start : start + len(words)], np.uint64(_mix(key + (1 << 40))), out=words)
    hidden, inner, group = layout.hidden, layout.intermediate, layout.format.group
    level = {4: 4.6, 8: 74.0}[layout.format.bits]  # root mean square of a random code
    for first, rows, columns in ((layout.gate_up_scales, 2 * inner, hidden), (layout.down_scales, hidden, inner)):
        scales = record[first : first + 2 * rows * (columns // group)].view(np.uint16)
        # 1 to 2 times a base that makes a dot of normal numbers about normal, of either sign: random bits of an fp16.
        # Codes -8..7 have a mean of -0.5: with scales of one sign all experts would share that direction, feed it to
        # each other and run away with it within 48 layers.
        base = np.float16(2.0 ** math.floor(math.log2(1.5 / (level * math.sqrt(columns)))))
        np.bitwise_and(scales, np.uint16(0x83FF), out=scales)
        np.bitwise_or(scales, base.view(np.uint16), out=scales)
    record[layout.down_scales + 2 * hidden * (inner // group) :] = 0
    if layout.format.bits == 8:  # the one code that no converter writes
        codes = record[: layout.gate_up_scales].view(np.int8)
        np.maximum(codes, np.int8(-127), out=codes)


def _mix(value: int) -> int:
    """splitmix64."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
