"""The words of the park pool between a lane and the owner: strict msgpack maps, one a message, over SOCK_SEQPACKET.

    hello                           -> segment_bytes, total_bytes, generation, and the pool's descriptor
    lease    tenant, blobs          -> segments: for each blob true (there), false, or the segments to write
    room     tenant, sizes          -> segments: for each size those to write; its digest is told by `name`
    name     digests                -> nothing
    publish  tenant, pages, marks   -> number
    abandon                         -> nothing
    changes  after                  -> sequence, void, more, removed, entries [number, tenant, [tokens, chain]…],
                                       touched: segments ever used
    pin      number, tenant         -> header: digest, size, segments
    where    number, digests        -> blobs: nil, or size and segments
    unpin    number                 -> nothing

Every reply has `punches`: how often the owner gave memory of free segments back to the host. Who pinned pages of the
pool pins them anew when it has changed: segments that were given back are other pages now.

Not here: sockets, what an entry is (park_index). Invariants: nothing of a message is used before its type and range
were looked at; a message is at most `PARK_MESSAGE_BYTES`; who changes a word above or what a part is called changes
`VERSION`, and lanes and owners of different ones do without each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgpack

from shared_experts import limits
from shared_experts.errors import ParkRefused

VERSION = 3
ID_BYTES = 16  # of a tenant, a digest, a chain value, a generation


def encode(fields: Mapping[str, object]) -> bytes:
    """A message; raises ParkRefused when it is too long."""
    message = cast(bytes, msgpack.packb(dict(fields)))
    if len(message) > limits.PARK_MESSAGE_BYTES:
        raise ParkRefused("a message over the limit")
    return message


def decode(message: bytes) -> dict[str, Any]:
    """A message's map; raises ParkRefused for anything else."""
    if len(message) > limits.PARK_MESSAGE_BYTES:
        raise ParkRefused("a message over the limit")
    try:
        raw = msgpack.unpackb(
            message, raw=False, strict_map_key=True, max_map_len=16, max_ext_len=0,
            max_array_len=limits.PARK_BLOBS, max_str_len=256, max_bin_len=64,
        )  # fmt: skip
    except Exception as error:  # msgpack has no single base class
        raise ParkRefused("a message that is not msgpack") from error
    if type(raw) is not dict:
        raise ParkRefused("a message that is not a map")
    return raw


def whole(value: object, least: int = 0, most: int = 1 << 62) -> int:
    """A whole number in the range."""
    if type(value) is not int or not least <= value <= most:
        raise ParkRefused("a number is missing or out of range")
    return value


def octets(value: object, size: int = ID_BYTES) -> bytes:
    """So many bytes."""
    if type(value) is not bytes or len(value) != size:
        raise ParkRefused("bytes are missing or of the wrong length")
    return value


def items(value: object, most: int, each: int | None = None) -> list[Any]:
    """A list of at most that many values; with `each`, of lists of that length."""
    if type(value) is not list or len(value) > most:
        raise ParkRefused("a list is missing or too long")
    if each is not None and not all(type(item) is list and len(item) == each for item in value):
        raise ParkRefused("a list of something else")
    return value


def flag(value: object) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ParkRefused("a flag is missing")
    return value
