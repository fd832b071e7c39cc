"""What a pack says about itself: `manifest.msgpack`, parsed with bounds and never trusted beyond its digest.

The file is a msgpack map {"magic": "expressway-pack", "version": 3, "sha256": digest of body, "body": bytes};
the body is the msgpack map of a `Manifest`. Not here: whether the sections' bytes match (`pack.Pack.verify`).

Invariant: a `Manifest` returned by `decode` has every number in range, sections that neither overlap nor miss a layer,
and its fingerprint recomputed.

Fingerprint: SHA-256 over lines of UTF-8, each ended by a newline:

    expressway-pack 3
    <experts: format hidden intermediate layers draft_layers experts record_bytes, separated by spaces>
    <SHA-256 of the config as JSON with sorted keys and no spaces, in hexadecimal>
    <per n-gram table in order of layer: its fields in the order of `NgramInfo`, numbers of a list joined by commas>
    <per section in order of name: name file offset bytes sha256-in-hexadecimal, separated by spaces>
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from os import PathLike

import msgpack

from shared_experts import limits
from shared_experts.errors import PackError
from shared_experts.fields import Fields, plain, plain_name, unique
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from shared_experts.qwen4_exp import ARCHITECTURE

Digest = bytes

PACK_VERSION = 3
MAGIC = "expressway-pack"
FILE_NAME = "manifest.msgpack"
EXPERTS_FILE, DENSE_FILE, NGRAM_FILE = "experts.bin", "dense.safetensors", "ngram.bin"
PAGE_BYTES = 4096
NGRAM_PART_BYTES = 1 << 30  # an n-gram table has one section, and one digest, per so many bytes
ROW_DTYPES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes of one file of the pack, with its digest.

    Names: "experts.<layer>", "dense", "ngram.<layer>.<part>", "file.<name>" (tokenizer and the like).
    """

    name: str
    file: str
    offset: int
    bytes: int
    sha256: Digest


@dataclass(frozen=True, slots=True)
class ExpertsInfo:
    """The shape of `experts.bin`: `layers` counts the draft layers, which come last."""

    format: str
    hidden: int
    intermediate: int
    layers: int
    draft_layers: int
    experts: int
    record_bytes: int

    @property
    def layout(self) -> RecordLayout:
        """Byte offsets inside a record."""
        return RecordLayout.of(EXPERT_FORMATS[self.format], self.hidden, self.intermediate)


@dataclass(frozen=True, slots=True)
class NgramInfo:
    """One n-gram table in `ngram.bin`: rows never cross a 4 KiB page unless one row is larger than a page.

    Row r starts at offset + (r // rows_per_page) * page_bytes + (r % rows_per_page) * row_bytes, where page_bytes is
    4,096 or, for a larger row, the row rounded up to pages (rows_per_page is then 1).
    """

    layer: int  # 0-based decoder layer
    rows: int
    columns: int
    dtype: str  # "bf16", "f16" or "f32"
    offset: int
    row_bytes: int
    rows_per_page: int
    page_bytes: int
    # the int64 hash constants of this layer, as the checkpoint's buffers say
    multipliers: tuple[int, ...]
    head_offsets: tuple[int, ...]
    head_vocab_sizes: tuple[int, ...]

    @property
    def table_bytes(self) -> int:
        """What the table takes in its file."""
        return -(-self.rows // self.rows_per_page) * self.page_bytes

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """(name, offset in the file, bytes) of each of its sections: whole pages, NGRAM_PART_BYTES but for the last."""
        step = NGRAM_PART_BYTES // self.page_bytes * self.page_bytes
        for number, start in enumerate(range(0, self.table_bytes, step)):
            yield f"ngram.{self.layer}.{number}", self.offset + start, min(step, self.table_bytes - start)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a lane or an owner needs to know before it reads a byte of the sections."""

    name: str
    architecture: str  # "qwen4_exp"
    config: dict[str, object]  # the checkpoint's text config, JSON types only
    experts: ExpertsInfo
    dense_dtype: str  # "bf16" or "f32"
    ngram: tuple[NgramInfo, ...]
    sections: tuple[Section, ...]
    fingerprint: bytes  # SHA-256 over the canonical section table
    created_by: str  # "expressway 0.1.0"


def fingerprint_of(manifest: Manifest) -> bytes:
    """The fingerprint that `manifest` must have; drawn in this module's docstring."""
    e = manifest.experts
    config = json.dumps(manifest.config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    lines = [
        f"{MAGIC} {PACK_VERSION}",
        f"{e.format} {e.hidden} {e.intermediate} {e.layers} {e.draft_layers} {e.experts} {e.record_bytes}",
        hashlib.sha256(config.encode()).hexdigest(),
    ]
    for table in sorted(manifest.ngram, key=lambda table: table.layer):
        values = (getattr(table, field.name) for field in fields(table))
        lines.append(" ".join(",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values))
    for s in sorted(manifest.sections, key=lambda section: section.name):
        lines.append(f"{s.name} {s.file} {s.offset} {s.bytes} {s.sha256.hex()}")
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).digest()


def finished(manifest: Manifest) -> Manifest:
    """The same manifest with its fingerprint computed."""
    return replace(manifest, fingerprint=fingerprint_of(manifest))


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.msgpack`."""
    body = msgpack.packb(_plain(manifest))
    whole = {"magic": MAGIC, "version": PACK_VERSION, "sha256": hashlib.sha256(body).digest(), "body": body}
    data: bytes = msgpack.packb(whole)
    return data


def decode(data: bytes, file: str | PathLike[str] = FILE_NAME) -> Manifest:
    """Parses and checks the bytes of `manifest.msgpack`; raises PackError that names `file`."""

    def fail(reason: str) -> PackError:
        return PackError(file, reason)

    whole = Fields(_unpack(data, fail), fail)
    if whole.text("magic", 64) != MAGIC:
        raise fail("this is not a pack's manifest")
    version = whole.integer("version", 0, 1 << 31)
    if version != PACK_VERSION:
        raise fail(f"pack version {version} is not read; this program reads {PACK_VERSION}")
    whole.exactly(("magic", "version", "sha256", "body"))
    packed = whole.binary("body")
    if hashlib.sha256(packed).digest() != whole.binary("sha256", 32):
        raise fail("the body does not have its SHA-256; the file is damaged")
    body = Fields(_unpack(packed, fail), fail)
    body.exactly(f.name for f in fields(Manifest))
    config = Fields(body.values.get("config"), fail, "config").values
    plain(config, fail)
    result = Manifest(
        name=body.text("name", 256),
        architecture=body.text("architecture", 64),
        config={str(key): value for key, value in config.items()},
        experts=_experts(Fields(body.values.get("experts"), fail, "experts")),
        dense_dtype=body.text("dense_dtype", 8),
        ngram=tuple(
            _ngram(Fields(v, fail, f"ngram[{i}]")) for i, v in enumerate(body.sequence("ngram", limits.LAYERS))
        ),
        sections=tuple(_section(v, fail) for v in body.sequence("sections", limits.SECTIONS)),
        fingerprint=body.binary("fingerprint", 32),
        created_by=body.text("created_by", 256),
    )
    if result.architecture != ARCHITECTURE:
        raise fail(f"architecture {result.architecture!r} is not read; known: {ARCHITECTURE}")
    if result.dense_dtype not in ("bf16", "f32"):
        raise fail(f"dense_dtype {result.dense_dtype!r} is neither bf16 nor f32")
    _check_sections(result, file)
    if fingerprint_of(result) != result.fingerprint:
        raise fail("the fingerprint is not that of the section table")
    return result


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _unpack(data: bytes, fail: Callable[[str], PackError]) -> object:
    def no_extension(code: int, _: bytes) -> object:
        raise ValueError(f"extension type {code} is not allowed")

    if len(data) > limits.MANIFEST_BYTES:
        raise fail(f"{len(data)} bytes; at most {limits.MANIFEST_BYTES} are read")
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=unique, ext_hook=no_extension, max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise fail(f"not valid msgpack: {str(error)[:200] or type(error).__name__}") from None


def _experts(read: Fields) -> ExpertsInfo:
    read.exactly(f.name for f in fields(ExpertsInfo))
    info = ExpertsInfo(
        format=read.text("format", 16),
        hidden=read.integer("hidden", 1, limits.HIDDEN),
        intermediate=read.integer("intermediate", 1, limits.HIDDEN),
        layers=read.integer("layers", 1, limits.LAYERS + limits.DRAFT_LAYERS),
        draft_layers=read.integer("draft_layers", 0, limits.DRAFT_LAYERS),
        experts=read.integer("experts", 1, limits.EXPERTS),
        record_bytes=read.integer("record_bytes", 1, limits.SECTION_BYTES),
    )
    if info.format not in EXPERT_FORMATS:
        read.refuse(f"experts.format {info.format!r} is not read; known: {', '.join(EXPERT_FORMATS)}")
    if info.draft_layers >= info.layers:
        read.refuse(f"experts.draft_layers {info.draft_layers} leaves no decoder layer of {info.layers}")
    try:
        needed = info.layout.record_bytes
    except ValueError as error:
        read.refuse(f"experts: {error}")
    if info.record_bytes != needed:
        read.refuse(f"experts.record_bytes is {info.record_bytes}; the layout needs {needed}")
    return info


def _ngram(read: Fields) -> NgramInfo:
    read.exactly(f.name for f in fields(NgramInfo))
    most = (1 << 63) - 1
    info = NgramInfo(
        layer=read.integer("layer", 0, limits.LAYERS),
        rows=read.integer("rows", 1, limits.NGRAM_ROWS),
        columns=read.integer("columns", 1, limits.WIDTH),
        dtype=read.text("dtype", 8),
        offset=read.integer("offset", 0, limits.SECTION_BYTES),
        row_bytes=read.integer("row_bytes", 1, 4 * limits.WIDTH),
        rows_per_page=read.integer("rows_per_page", 1, PAGE_BYTES),
        page_bytes=read.integer("page_bytes", PAGE_BYTES, 8 * limits.WIDTH),
        multipliers=tuple(read.integers("multipliers", 16, 1, most)),
        head_offsets=tuple(read.integers("head_offsets", limits.NGRAM_HEADS, 0, limits.NGRAM_ROWS)),
        head_vocab_sizes=tuple(read.integers("head_vocab_sizes", limits.NGRAM_HEADS, 1, limits.NGRAM_ROWS)),
    )
    if info.dtype not in ROW_DTYPES:
        read.refuse(f"ngram dtype {info.dtype!r} is not read; known: {', '.join(ROW_DTYPES)}")
    if ngram_pages(info.columns, info.dtype) != (info.row_bytes, info.rows_per_page, info.page_bytes):
        read.refuse(f"the n-gram table of layer {info.layer} has row and page sizes that its columns do not give")
    if len(info.head_offsets) != len(info.head_vocab_sizes) or not info.head_offsets or len(info.multipliers) < 2:
        read.refuse(f"the n-gram table of layer {info.layer} has hash constants of unequal or no length")
    if max(o + s for o, s in zip(info.head_offsets, info.head_vocab_sizes, strict=True)) > info.rows:
        read.refuse(f"the n-gram table of layer {info.layer} has fewer rows than its hash constants reach")
    return info


def ngram_pages(columns: int, dtype: str) -> tuple[int, int, int]:
    """(row_bytes, rows_per_page, page_bytes) of a table."""
    row_bytes = columns * ROW_DTYPES[dtype]
    if row_bytes <= PAGE_BYTES:
        return row_bytes, PAGE_BYTES // row_bytes, PAGE_BYTES
    return row_bytes, 1, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES


def _section(value: object, fail: Callable[[str], PackError]) -> Section:
    read = Fields(value, fail, "section")
    read.exactly(f.name for f in fields(Section))
    section = Section(
        name=read.text("name", 5 + limits.FILE_NAME_BYTES),
        file=read.text("file", limits.FILE_NAME_BYTES),
        offset=read.integer("offset", 0, limits.SECTION_BYTES),
        bytes=read.integer("bytes", 0, limits.SECTION_BYTES),
        sha256=read.binary("sha256", 32),
    )
    if not plain_name(section.file) or section.file == FILE_NAME:
        read.refuse(f"section {section.name!r}: the file {section.file!r} is not a plain file name of a section")
    return section


def _check_sections(manifest: Manifest, file: str | PathLike[str]) -> None:
    """Every part has its section, at its place and of its size; no section overlaps another."""
    e = manifest.experts
    layer_bytes = e.experts * e.record_bytes
    wanted: dict[str, tuple[str, int, int | None]] = {"dense": (DENSE_FILE, 0, None)}
    for layer in range(e.layers):
        wanted[f"experts.{layer}"] = (EXPERTS_FILE, layer * layer_bytes, layer_bytes)
    if len({table.layer for table in manifest.ngram}) != len(manifest.ngram):
        raise PackError(file, "two n-gram tables of one layer")
    if sum(-(-table.table_bytes // NGRAM_PART_BYTES) for table in manifest.ngram) > limits.SECTIONS:
        raise PackError(file, f"n-gram tables so large that they have more than {limits.SECTIONS} sections")
    for table in manifest.ngram:
        if table.offset % PAGE_BYTES:
            raise PackError(file, f"offset {table.offset} is no multiple of a page", section=f"ngram.{table.layer}.0")
        wanted |= {name: (NGRAM_FILE, offset, size) for name, offset, size in table.parts()}
    by_name = {section.name: section for section in manifest.sections}
    if len(by_name) != len(manifest.sections):
        raise PackError(file, "two sections have one name")
    for name, (where, offset, exact) in wanted.items():
        section = by_name.get(name)
        if section is None:
            raise PackError(file, "is missing", section=name)
        if section.file != where or section.offset != offset or (exact is not None and section.bytes != exact):
            reason = (
                f"lies at {section.offset} of {section.file} with {section.bytes} bytes; wanted {offset} of {where}"
            )
            raise PackError(file, reason if exact is None else f"{reason} with {exact}", section=name)
    for section in by_name.values():
        if section.name not in wanted and (section.name != f"file.{section.file}" or section.offset):
            raise PackError(file, "has a name or place that no section has", section=section.name)
    ends: dict[str, int] = {}
    for section in sorted(manifest.sections, key=lambda s: (s.file, s.offset, s.bytes)):
        if section.offset < ends.get(section.file, 0):
            raise PackError(file, f"overlaps another section of {section.file}", section=section.name)
        ends[section.file] = section.offset + section.bytes
