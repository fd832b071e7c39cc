"""What a pack says about itself: `manifest.msgpack`, parsed with bounds and never trusted beyond its digest.

The file is a msgpack map {"magic": "expressway-pack", "version": 1, "sha256": digest of body, "body": bytes};
the body is the msgpack map of a `Manifest`. Not here: whether the sections' bytes match (`pack.Pack.verify`).

Invariant: a `Manifest` returned by `decode` has every number in range and its fingerprint recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared_experts.layout import EXPERT_FORMATS, RecordLayout

PACK_VERSION = 1


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes of one file of the pack, with its digest.

    Names: "experts.<layer>", "dense", "ngram.<layer>", "file.<name>" (tokenizer and the like).
    """

    name: str
    file: str
    offset: int
    bytes: int
    sha256: bytes


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
