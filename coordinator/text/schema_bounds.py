"""Which schemas are handed to the grammar library at all: it follows references on its stack, looks for a text that
all patterns of one value match, which takes twice as long with each of them, and compares properties with one another;
none of which can be stopped. And it takes a schema that is nothing but itself, of which an empty answer comes.

Not here: whether a schema can be kept (the library says so). Invariant: an upper bound, so a schema that passes is
shallow in whatever order its references are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from coordinator import limits
from coordinator.errors import BadRequest, OutOfRange

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SAME_VALUE = ("allOf", "anyOf", "oneOf")  # what is below describes the value that the schema itself describes


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """`OutOfRange` for a schema whose references go too deep, that lays too many patterns on one value, or that names
    too many properties; `BadRequest` for one with a part that is nothing but a reference to itself."""
    depths: dict[int, int] = {}
    _depth(schema, depths)
    mappings = list(_mappings(schema))
    named = (node.get("properties") for node in mappings)
    if sum(len(properties) for properties in named if isinstance(properties, Mapping)) > limits.SCHEMA_PROPERTIES:
        raise OutOfRange(f"a schema has at most {limits.SCHEMA_PROPERTIES} properties", param=param)
    references = {node[key] for node in mappings for key in _REFERENCES if isinstance(node.get(key), str)}
    levels = depths[id(schema)]
    targets: dict[str, Any] = {}
    for reference in references:
        target = _target(schema, reference)
        targets[reference] = target
        levels += depths.get(id(target), 1)
        if levels > limits.SCHEMA_LEVELS:
            raise OutOfRange(f"what a schema refers to has at most {limits.SCHEMA_LEVELS} levels in all", param=param)
    _check_patterns(mappings, targets, param)
    _check_grounded(mappings, targets, param)


def _check_grounded(mappings: Sequence[Mapping[str, Any]], targets: Mapping[str, Any], param: str) -> None:
    """From those that refer to nothing upwards: who is left says nothing but itself."""
    needs: dict[int, int] = {}  # of a schema: what it still waits for
    waiting: dict[int, list[list[int]]] = {}  # by what is waited for: [who waits], emptied when the first one came
    for node in {id(node): node for node in mappings}.values():
        groups = _alternatives(node, targets)
        needs[id(node)] = len(groups)
        for group in groups:
            who = [id(node)]
            for each in group:
                waiting.setdefault(id(each), []).append(who)
    grounded = [number for number, count in needs.items() if not count]
    while grounded:
        for who in waiting.get(grounded.pop(), ()):
            if who:
                number = who.pop()
                needs[number] -= 1
                if not needs[number]:
                    grounded.append(number)
    if any(needs.values()):
        raise BadRequest("the schema cannot be kept: a part of it is nothing but a reference to itself", param=param)


def _alternatives(node: Mapping[str, Any], targets: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Of the value that `node` describes: lists of schemas, one at least of each list describes it, too."""
    reference = node.get("$ref")
    found: list[list[Any]] = []
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):  # targets of others are guesses
        found.append([targets[reference]])
    if isinstance(node.get("allOf"), list):
        found += [[each] for each in node["allOf"]]
    found += [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)]
    return [group for group in found if all(isinstance(each, Mapping) for each in group)]


def _check_patterns(mappings: Sequence[Mapping[str, Any]], targets: Mapping[str, Any], param: str) -> None:
    steps = 0
    for start in mappings:
        if "allOf" not in start and not any(key in start for key in _REFERENCES):
            continue
        patterns, seen, waiting = 0, {id(start)}, [start]
        while waiting:
            node = waiting.pop()
            steps += 1
            patterns += isinstance(node.get("pattern"), str)
            if patterns > limits.SCHEMA_PATTERNS or steps > limits.SCHEMA_STEPS:
                raise OutOfRange(f"one value has at most {limits.SCHEMA_PATTERNS} patterns", param=param)
            for other in _same_value(node, targets):
                if isinstance(other, Mapping) and id(other) not in seen:
                    seen.add(id(other))
                    waiting.append(other)


def _same_value(node: Mapping[str, Any], targets: Mapping[str, Any]) -> Iterator[Any]:
    for key in _SAME_VALUE:
        if isinstance(node.get(key), list):
            yield from node[key]
    for key in _REFERENCES:
        if isinstance(node.get(key), str):
            yield targets[node[key]]


def _depth(node: object, depths: dict[int, int]) -> int:
    """Of lists and mappings in one another; bodies bound it."""
    below = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else None
    if below is None:
        return 0
    depths[id(node)] = depth = 1 + max((_depth(child, depths) for child in below), default=0)
    return depth


def _mappings(node: object) -> Iterator[Mapping[str, Any]]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _target(schema: Mapping[str, Any], reference: str) -> object:
    """What a reference names; the whole schema where it is no path into it."""
    if not reference.startswith("#/"):
        return schema
    node: object = schema
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isascii() and name.isdigit() and len(name) < 8 and int(name) < len(node):
            node = node[int(name)]
        else:
            return schema
    return node
