"""Bodies of requests: bytes to one JSON object, and that to a typed body or an error that names the field.

Types are checked strictly ("5" is not 5); values are checked later, by `request.check`.

Not here: the bodies of the APIs. Invariant: an error names fields and quotes nothing else of the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

from coordinator import limits
from coordinator.errors import BadRequest, OutOfRange, Unsupported

_B = TypeVar("_B", bound=BaseModel)
_T = TypeVar("_T")

List = Annotated[list[_T], Field(fail_fast=True)]  # a list of millions of wrong entries is one error, not millions

_HOLDERS = (dict, list)  # what JSON nests


class Strict(BaseModel):
    """A part of a body: other fields than its own are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def parse_json(data: bytes) -> dict[str, Any]:
    """The body: one JSON object, UTF-8, no NaN or Infinity, bounded depth."""
    if not data:
        raise BadRequest("a JSON body is required")
    return _parse_object(data, "the body", None)


def parse_object(text: str, param: str) -> dict[str, Any]:
    """A field that is JSON in a string: as for a body."""
    return _parse_object(text.encode(), param, param)


def _parse_object(data: bytes, what: str, param: str | None) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"{what} is not valid JSON: {_without_input(error)}", param=param) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object", param=param)
    if data.count(b"[") + data.count(b"{") > limits.JSON_DEPTH:  # else it has not that many levels
        _check_depth(value, what, param)
    return value


def parse_body(kind: type[_B], value: dict[str, Any]) -> _B:
    """The typed body."""
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        _raise(error)


def refuse_unsupported(value: dict[str, Any], refusals: dict[str, tuple[object, ...]]) -> None:
    """`refusals`: fields that change the answer and are not supported -> the values that change nothing."""
    for name in refusals.keys() & value.keys():
        if not any(type(value[name]) is type(harmless) and value[name] == harmless for harmless in refusals[name]):
            raise Unsupported(f"{name} is not supported", param=name)


def check_length(value: dict[str, Any], name: str, most: int) -> None:
    """Of a list or an object, before its entries are looked at."""
    found = value.get(name)
    if isinstance(found, list | dict) and len(found) > most:
        raise OutOfRange(f"at most {most} {name}", param=name)


def _raise(error: pydantic.ValidationError) -> NoReturn:
    """The first mistake, by the name of its field: of several alternatives, the one that went furthest."""
    names = frozenset(_names(Strict))
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    same_field = [mistake for mistake in mistakes if mistake["loc"][:1] == mistakes[0]["loc"][:1]]
    furthest = max(same_field, key=lambda mistake: len(_path(mistake["loc"], names)))
    param = ".".join(_path(furthest["loc"], names))
    message = "is required" if furthest["type"] == "missing" else furthest["msg"][0].lower() + furthest["msg"][1:]
    raise BadRequest(f"{param}: {message}", param=param) from None


def _path(loc: tuple[int | str, ...], names: frozenset[str]) -> list[str]:
    """Without the names of alternatives that pydantic puts between those of fields."""
    return [str(part) for part in loc if isinstance(part, int) or part in names]


def _names(kind: type[BaseModel]) -> Iterator[str]:
    yield from kind.model_fields
    for other in kind.__subclasses__():
        yield from _names(other)


def _without_input(error: ValueError) -> str:
    """The parser's reason with its place; it quotes nothing of the body."""
    return str(error).splitlines()[0]


def _check_depth(value: dict[str, Any], what: str, param: str | None) -> None:
    level: list[Any] = [value]
    for _ in range(limits.JSON_DEPTH):
        level = [
            child
            for holder in level
            for child in (holder.values() if isinstance(holder, dict) else holder)
            if type(child) in _HOLDERS
        ]
        if not level:
            return
    raise BadRequest(f"{what} is nested deeper than {limits.JSON_DEPTH} levels", param=param)
