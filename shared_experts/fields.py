"""Reads values out of parsed JSON and msgpack maps: exact types, ranges, no surprises.

Not a schema library: a `Fields` wraps one map and hands out checked values, raising the error that its owner gave it.
Invariant: a value that comes out has exactly the Python type and the range that was asked for (bool is never an int).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from shared_experts.limits import FILE_NAME_BYTES, NESTING, NODES

Fail = Callable[[str], Exception]
_MISSING = object()
_UNWANTED = re.compile("[\\0-\\x1f\\ud800-\\udfff]")


class Fields:
    """One map; `fail` makes the exception for a reason."""

    def __init__(self, values: object, fail: Fail, where: str = "") -> None:
        self._fail, self._where = fail, where
        if type(values) is not dict:
            self.refuse(f"{where or 'the document'} is not a map")
        assert isinstance(values, dict)
        self.values: dict[object, object] = values

    def refuse(self, reason: str) -> NoReturn:
        """Raises the owner's error."""
        raise self._fail(reason)

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            self.refuse(f"{self._where}{'.' if self._where else ''}{name} is missing")
        return default

    def _wrong(self, name: str, what: str, value: object) -> NoReturn:
        self.refuse(f"{self._where}{'.' if self._where else ''}{name} must be {what}, not {_short(value)}")

    def integer(self, name: str, low: int, high: int, default: object = _MISSING) -> int:
        """An int in low..high; a missing or null value is `default` where one is given."""
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            self._wrong(name, f"an integer in {low}..{high}", value)
        return value

    def text(self, name: str, longest: int, default: object = _MISSING) -> str:
        """A string of at most `longest` bytes in UTF-8, without control characters and halves of surrogate pairs."""
        value = self._get(name, default)
        if type(value) is not str or len(value.encode(errors="replace")) > longest or _UNWANTED.search(value):
            self._wrong(name, f"a string of at most {longest} bytes", value)
        return value

    def boolean(self, name: str, default: object = _MISSING) -> bool:
        """True or False."""
        value = self._get(name, default)
        if type(value) is not bool:
            self._wrong(name, "true or false", value)
        return value

    def binary(self, name: str, size: int | None = None) -> bytes:
        """Bytes, of exactly `size` where one is given."""
        value = self._get(name, _MISSING)
        if type(value) is not bytes or (size is not None and len(value) != size):
            self._wrong(name, "bytes" if size is None else f"{size} bytes", value)
        return value

    def sequence(self, name: str, longest: int, default: object = _MISSING) -> list[object]:
        """A list of at most `longest` items."""
        value = self._get(name, default)
        if type(value) is not list or len(value) > longest:
            self._wrong(name, f"a list of at most {longest} items", value)
        return value

    def integers(self, name: str, longest: int, low: int, high: int, default: object = _MISSING) -> list[int]:
        """A list of integers in low..high."""
        items = self.sequence(name, longest, default)
        for item in items:
            if type(item) is not int or not low <= item <= high:
                self._wrong(name, f"a list of integers in {low}..{high}", item)
        return items  # type: ignore[return-value]

    def exactly(self, names: Iterable[str]) -> None:
        """Refuses keys that are not among `names`."""
        known = set(names)
        extra = sorted(str(key) for key in self.values if key not in known)
        if extra:
            self.refuse(f"{self._where or 'the document'} has an unknown key {_short(extra[0])}")


def plain(value: object, fail: Fail, *, nesting: int = NESTING) -> None:
    """Refuses anything but JSON types, too deep or too many of them."""
    stack: list[tuple[object, int]] = [(value, 0)]
    seen = 0
    while stack:
        item, depth = stack.pop()
        seen += 1
        if depth > nesting or seen > NODES:
            raise fail(f"nested deeper than {nesting} or more than {NODES} values")
        if type(item) is dict:
            if any(type(key) is not str for key in item):
                raise fail("a map has a key that is not a string")
            stack.extend((v, depth + 1) for pair in item.items() for v in pair)
        elif type(item) is list:
            stack.extend((v, depth + 1) for v in item)
        elif type(item) is int or type(item) is float:
            if not -(1 << 63) <= item < 1 << 64:  # not a number compares as false
                raise fail("a number is not finite or has more than 64 bits")
        elif type(item) is str:
            if any("\ud800" <= c <= "\udfff" for c in item):
                raise fail("a text has half of a surrogate pair")
        elif item is not None and type(item) is not bool:
            raise fail(f"a value of type {type(item).__name__} is not allowed")


def unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
    """Object hook that refuses a key given twice (ValueError)."""
    result: dict[object, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {_short(key)} is given twice")
        result[key] = value
    return result


def parse_json(data: bytes, fail: Fail) -> object:
    """Strict JSON: UTF-8, no repeated keys, no NaN or infinity, bounded nesting."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not allowed")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise fail(f"not valid JSON: {error or 'nested too deeply'}") from None


def plain_name(name: str) -> bool:
    """Whether a name is one plain component: no separator, no dots first, nothing odd."""
    return re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{FILE_NAME_BYTES - 1}}}", name) is not None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
