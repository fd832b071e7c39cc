"""The shared region's header: what it says, how it is written, and the checks a descriptor passes before it is used.

The byte map stands in layout.py, the protocol with its drawing in docs/region.md. Not here: filling (fill.py), passing
descriptors (handoff.py), mapping (attach.py).
Invariant: a `RegionHeader` returned by `check_descriptor` belongs to an immutable, finished region of that shape.
"""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from dataclasses import dataclass

from shared_experts.errors import RegionError, RegionMismatch
from shared_experts.layout import (
    EXPERT_FORMATS,
    REGION_HEADER,
    REGION_HEADER_BYTES,
    REGION_LAYOUT_VERSION,
    REGION_MAGIC,
    REGION_READY,
    REGION_STATE_OFFSET,
    align,
)
from shared_experts.manifest import Manifest
from shared_experts.memfd import REQUIRED_SEALS

GENERATION_BYTES = 16
_CRC_OFFSET = 120  # the CRC covers every byte before itself


@dataclass(frozen=True, slots=True)
class RegionShape:
    """What a pack's manifest promises about its region: sizes, fingerprint and one digest per layer."""

    fingerprint: bytes
    format_id: int
    hidden: int
    intermediate: int
    layers: int
    experts: int
    record_bytes: int
    layer_sha256: tuple[bytes, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> RegionShape:
        """Reads the manifest; raises RegionError when its sections are not one run of records per layer."""
        info = manifest.experts
        sections = {s.name: s for s in manifest.sections}
        digests = []
        for layer in range(info.layers):
            section = sections.get(f"experts.{layer}")
            size = info.experts * info.record_bytes
            if section is None or (section.offset, section.bytes) != (layer * size, size):
                raise RegionError(f"the manifest has no section of {size} bytes at {layer * size} for layer {layer}")
            digests.append(section.sha256)
        return cls(
            manifest.fingerprint, EXPERT_FORMATS[info.format].id, info.hidden, info.intermediate,
            info.layers, info.experts, info.record_bytes, tuple(digests),
        )  # fmt: skip

    @property
    def layer_bytes(self) -> int:
        """Bytes of the records of one layer."""
        return self.experts * self.record_bytes

    @property
    def total_bytes(self) -> int:
        """Header page and all records."""
        return REGION_HEADER_BYTES + self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """The header page's fields; see the byte map in layout.py."""

    total_bytes: int
    generation: bytes
    fingerprint: bytes
    owner_pid: int
    owner_start_ticks: int
    layers: int
    experts: int
    record_bytes: int
    format_id: int
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, shape: RegionShape, generation: bytes, owner_pid: int) -> RegionHeader:
        """The header of a new region made by the live process `owner_pid`."""
        return cls(
            shape.total_bytes, generation, shape.fingerprint, owner_pid, start_ticks(owner_pid), shape.layers,
            shape.experts, shape.record_bytes, shape.format_id, shape.hidden, shape.intermediate,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Bytes 0..127; the state word is not part of it because it is written last."""
        body = REGION_HEADER.pack(
            REGION_MAGIC, REGION_LAYOUT_VERSION, REGION_HEADER_BYTES, self.total_bytes, self.generation,
            self.fingerprint, self.owner_pid, 0, self.owner_start_ticks, self.layers, self.experts,
            self.record_bytes, self.format_id, self.hidden, self.intermediate, 0, 0, 0,
        )  # fmt: skip
        crc = zlib.crc32(body[:_CRC_OFFSET])
        return body[:_CRC_OFFSET] + crc.to_bytes(4, "little") + bytes(4)

    @classmethod
    def decode(cls, page: bytes) -> RegionHeader:
        """Parses a header page; raises RegionMismatch naming the check that failed."""
        if len(page) < REGION_STATE_OFFSET + 8:
            raise RegionMismatch("the region is shorter than its header", check="size")
        if page[REGION_STATE_OFFSET : REGION_STATE_OFFSET + 8] != READY_WORD:
            raise RegionMismatch("the region was never finished", check="ready")
        (magic, version, header_bytes, total, generation, fingerprint, pid, reserved_1, ticks, layers, experts,
         record_bytes, format_id, hidden, intermediate, reserved_2, crc, reserved_3) = REGION_HEADER.unpack(
            page[: REGION_HEADER.size]
        )  # fmt: skip
        if magic != REGION_MAGIC:
            raise RegionMismatch("not an expert region", check="magic")
        if crc != zlib.crc32(page[:_CRC_OFFSET]):
            raise RegionMismatch("the header's checksum is wrong", check="crc")
        if (version, header_bytes) != (REGION_LAYOUT_VERSION, REGION_HEADER_BYTES):
            raise RegionMismatch(
                f"layout version {version}, this program reads {REGION_LAYOUT_VERSION}", check="layout_version"
            )
        if reserved_1 or reserved_2 or reserved_3:
            raise RegionMismatch("a reserved field is not zero", check="reserved")
        return cls(
            total, generation, fingerprint, pid, ticks, layers, experts, record_bytes, format_id, hidden, intermediate
        )


READY_WORD = REGION_READY.to_bytes(8, "little")


def check_descriptor(fd: int, shape: RegionShape, *, generation: bytes | None = None) -> RegionHeader:
    """Proves, without touching a record, that `fd` is the immutable region of `shape`; raises RegionMismatch.

    The header is read with pread, never through a map: whoever sent the descriptor cannot make this process fault.
    """
    try:
        flags, seals = fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionMismatch("the descriptor is not a sealed memory file", check="seals") from error
    if seals & REQUIRED_SEALS != REQUIRED_SEALS:
        raise RegionMismatch(f"seals {seals:#x}, wanted {REQUIRED_SEALS:#x}", check="seals")
    if flags & os.O_ACCMODE != os.O_RDONLY:
        raise RegionMismatch("the descriptor is open for writing", check="access_mode")
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RegionMismatch("the descriptor is not a memory file", check="seals")
    header = RegionHeader.decode(os.pread(fd, REGION_HEADER_BYTES, 0))
    if header.fingerprint != shape.fingerprint:
        raise RegionMismatch(
            f"the region holds pack {header.fingerprint.hex()[:16]}, wanted {shape.fingerprint.hex()[:16]}",
            check="fingerprint",
        )
    found = (header.format_id, header.hidden, header.intermediate, header.layers, header.experts, header.record_bytes)
    wanted = (shape.format_id, shape.hidden, shape.intermediate, shape.layers, shape.experts, shape.record_bytes)
    if found != wanted:
        raise RegionMismatch(f"the region's shape is {found}, wanted {wanted}", check="shape")
    # fstatvfs gives the page size of the file system behind a memfd: 4 KiB, or 2 MiB from the huge page pool.
    size_bytes = align(shape.total_bytes, os.fstatvfs(fd).f_bsize)
    if header.total_bytes != shape.total_bytes or status.st_size != size_bytes:
        raise RegionMismatch(
            f"the region says {header.total_bytes} bytes in a file of {status.st_size}, "
            f"wanted {shape.total_bytes} in {size_bytes}",
            check="size",
        )
    if generation is not None and header.generation != generation:
        raise RegionMismatch(f"generation {header.generation.hex()}, wanted {generation.hex()}", check="generation")
    return header


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: field 22 of /proc/<pid>/stat."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
