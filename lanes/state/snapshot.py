"""A conversation as bytes: pages of rows, checkpoints, and a header that says which tokens and parts they are.

    header   magic, version, fingerprint 32, layout 16, tenant 16 | tokens n, marks m, page tokens | tokens u32 [n]
             | digests of pages 16 [ceil(n / page tokens)] | marks: tokens u32, waiting u32, digest 16 [m]
    page     what its tokens have in every growing buffer, end to end, in the order of `SequenceState.rows`
    checkpoint                                               in the order of `SequenceState.fixed`

A part is named by a digest of its bytes (shared_experts.park_digest). Not here: where the bytes are (parking).
Invariants: parsing a header reads nothing outside it and believes no number before its range was looked at; bytes enter
a state only after their digest, taken over the copy that is used, was the expected one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.state.errors import SnapshotRefused
from lanes.state.reuse import Ids
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from shared_experts import park_digest

MAGIC = b"XPWYCONV"
VERSION = 2
DIGEST_BYTES = 16
MOST_MARKS = 64
_HEAD = struct.Struct("<8sI32s16s16sIII")
_MARK = struct.Struct("<II16s")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a parked state must come from to be used here."""

    fingerprint: bytes  # of the pack
    layout: bytes  # of the state's shape

    @classmethod
    def of(cls, fingerprint: bytes, shape: StateShape) -> Identity:
        """The identity of this lane's states."""
        return cls(fingerprint, hashlib.blake2b(repr(shape).encode(), digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class SavedMark:
    """A checkpoint in a snapshot."""

    tokens: int
    waiting: int  # of a draft layer
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot holds."""

    identity: Identity
    tenant: bytes  # 16 bytes that stand for its salt
    ids: Ids
    pages: tuple[bytes, ...]
    marks: tuple[SavedMark, ...]  # ascending

    def encode(self) -> bytes:
        """As bytes."""
        head = _HEAD.pack(
            MAGIC, VERSION, self.identity.fingerprint, self.identity.layout, self.tenant,
            self.ids.shape[0], len(self.marks), limits.PAGE_TOKENS,
        )  # fmt: skip
        marks = b"".join(_MARK.pack(mark.tokens, mark.waiting, mark.digest) for mark in self.marks)
        return head + self.ids.astype("<u4").tobytes() + b"".join(self.pages) + marks

    @classmethod
    def decode(cls, data: bytes, identity: Identity, tenant: bytes, most_tokens: int) -> Header:
        """The header, if it is of this model and tenant; raises SnapshotRefused."""
        if len(data) < _HEAD.size:
            raise SnapshotRefused("a header that is too short")
        magic, version, fingerprint, layout, of_tenant, tokens, count, page_tokens = _HEAD.unpack_from(data)
        if (magic, version, page_tokens) != (MAGIC, VERSION, limits.PAGE_TOKENS):
            raise SnapshotRefused("not a snapshot of this version")
        if (fingerprint, layout) != (identity.fingerprint, identity.layout):
            raise SnapshotRefused("a snapshot of another model")
        if of_tenant != tenant:
            raise SnapshotRefused("a snapshot of another tenant")
        pages = -(-tokens // limits.PAGE_TOKENS)
        sizes = (_HEAD.size, 4 * tokens, DIGEST_BYTES * pages, _MARK.size * count)
        if not 1 <= tokens <= most_tokens or count > MOST_MARKS or len(data) != sum(sizes):
            raise SnapshotRefused("a header whose sizes do not fit together")
        at = _HEAD.size
        ids = np.frombuffer(data, "<u4", tokens, at).astype(np.uint32)
        at += 4 * tokens
        digests = tuple(data[at + 16 * page : at + 16 * (page + 1)] for page in range(pages))
        at += DIGEST_BYTES * pages
        marks = tuple(SavedMark(*_MARK.unpack_from(data, at + _MARK.size * mark)) for mark in range(count))
        places = [mark.tokens for mark in marks]
        if places != sorted(set(places)) or not all(0 < place <= tokens for place in places):
            raise SnapshotRefused("checkpoints that are not inside their tokens")
        return cls(identity, tenant, ids, digests, marks)


def tenant_key(salt: bytes, routing: bytes = b"") -> bytes:
    """16 bytes that stand for a tenant; its salt stays in the lane.

    `routing` is not empty where prompts are read approximately: such states are a tenant's of their own.
    """
    return hashlib.blake2b(salt, digest_size=16, person=b"expressway-park", key=routing).digest()


def digest(data: Bytes) -> bytes:
    """The name of a part."""
    return park_digest.of_bytes(data)


def pack(tensors: Sequence[torch.Tensor]) -> Bytes:
    """Their bytes, end to end, uint8 [sum of sizes]."""
    parts = [tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(parts).numpy() if parts else np.zeros(0, np.uint8)


def page_range(page: int, tokens: int) -> tuple[int, int]:
    """First and end token of a page of a conversation of that many tokens."""
    return page * limits.PAGE_TOKENS, min((page + 1) * limits.PAGE_TOKENS, tokens)


def page_bytes(shape: StateShape, first: int, end: int) -> int:
    """Bytes of the page of those tokens."""
    return sum(_size(size, dtype) for size, dtype in shape.row_shapes(first, end))


def pages_bytes(shape: StateShape, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The same of many; of equal pages it is worked out once."""
    steps = {each.tokens for attention in shape.attention.values() for each in attention.growing()}
    known: dict[tuple[int, ...], int] = {}
    sizes = []
    for first, end in ranges:
        key = (end - first, *(first % step for step in steps))
        if key not in known:
            known[key] = page_bytes(shape, first, end)
        sizes.append(known[key])
    return sizes


def fixed_bytes(state: SequenceState) -> int:
    """Bytes of a checkpoint."""
    return sum(tensor.nbytes for tensor in state.fixed())


def unpack_page(data: Bytes, state: SequenceState, first: int, end: int, until: int) -> None:
    """Puts a page of tokens first..end-1 into the state's rows, but nothing of tokens from `until` on."""
    stop, at = min(end, until), 0
    for (size, dtype), into in zip(state.shape.row_shapes(first, end), state.rows(first, stop), strict=True):
        count = _size(size, dtype)
        if not count:
            continue
        rows = torch.from_numpy(data[at : at + count].copy()).view(dtype).view(size)
        into.copy_(rows[..., : into.shape[-2], :])
        at += count


def unpack_fixed(data: Bytes, state: SequenceState) -> None:
    """Puts a checkpoint into the state's tensors of fixed size."""
    unpack(data, state.fixed())


def unpack(data: Bytes, tensors: Sequence[torch.Tensor]) -> None:
    """The way back from `pack`."""
    at = 0
    for tensor in tensors:
        part = torch.from_numpy(data[at : at + tensor.nbytes].copy())
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes


def _size(size: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for length in size:
        count *= length
    return count
