"""How inputs are drawn: any values, good bytes spoilt, good documents with something else in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

_LENGTHS = [b"\0" * 8, b"\xff" * 4, b"\xff" * 8, (1 << 31).to_bytes(4, "little"), (1 << 62).to_bytes(8, "little")]
_NUMBERS = st.sampled_from([0, 1, -1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63)])
_TEXTS = st.sampled_from(["", "../x", "/etc/passwd", "\0", "a" * 300, "<|im_end|>", "\u202e", "1e999", "F32"])
_HALF = st.just("\ud800")  # JSON can spell half of a surrogate pair, no UTF-8 can hold it


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and maps of leaves."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )


# What JSON can say; msgpack says bytes too, and no more than 64 bits.
JSON_VALUES = trees(
    st.none() | st.booleans() | _NUMBERS | st.integers() | st.floats() | _TEXTS | _HALF | st.text(max_size=40)
)  # fmt: skip
MSGPACK_VALUES = trees(
    st.none() | st.booleans() | _NUMBERS | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | _TEXTS
    | st.text(max_size=40) | st.binary(max_size=40)
)  # fmt: skip


@st.composite
def spoilt(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the good inputs, as it is or with up to four edits."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(1, 16)))
        match draw(st.sampled_from(["set", "flip", "remove", "repeat", "insert", "cut", "splice"])):
            case "set":
                data[start:stop] = draw(st.sampled_from(_LENGTHS) | st.binary(min_size=1, max_size=8))
            case "flip" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "remove":
                del data[start:stop]
            case "repeat":
                data[start:start] = data[start:stop] * draw(st.integers(1, 64))
            case "insert":
                data[start:start] = draw(st.binary(min_size=1, max_size=16))
            case "cut":
                del data[start:]
            case "splice":
                data[start:] = draw(st.sampled_from(seeds))[start:]
    return bytes(data)


@st.composite
def altered(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any]) -> Any:
    """The good document, as it is or changed in up to three places: another value, none, a new key, a copy."""
    whole = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        holder = whole
        while True:  # walks down, and stops somewhere
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and draw(st.booleans()):
                holder = holder[key]
                continue
            match draw(st.sampled_from(["value", "number", "remove", "add", "copy"])):
                case "value":
                    holder[key] = draw(values)
                case "number" if type(holder[key]) is int:
                    moved = holder[key] + draw(st.sampled_from([-1, 1, 4096, 1 << 32]) | st.integers(-64, 64))
                    holder[key] = min(max(moved, -(1 << 63)), (1 << 64) - 1)  # what msgpack can say
                case "remove":
                    del holder[key]
                case "add" if isinstance(holder, dict):
                    holder[draw(st.text(max_size=8))] = draw(values)
                case "copy":
                    holder[key] = copy.deepcopy(holder[draw(st.sampled_from(keys))])
            break
    return whole


def either(
    document: Any, values: st.SearchStrategy[Any], encode: Callable[[Any], bytes], more: Sequence[bytes] = ()
) -> st.SearchStrategy[bytes]:
    """Bytes of an altered document, or bytes of a good one spoilt."""
    return altered(document, values).map(encode) | spoilt([encode(document), *more])
