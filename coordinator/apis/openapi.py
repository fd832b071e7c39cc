"""The HTTP door described as OpenAPI 3.1, made from the bodies that are really read.

Not here: what is served (doors). Invariants: a body's schema is that of the class that parses it; a route that answers
without a key says so, every other one names both ways to send one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_OPENAI_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "description": "stable"},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "request_id": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "code": {"type": "string", "description": "stable"},
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class Route:
    """One route as its readers see it."""

    method: str  # in lower case
    path: str
    summary: str
    body: type[BaseModel] | None = None
    streams: bool = False
    anthropic: bool = False
    needs_key: bool = True
    statuses: Mapping[str, str] | None = None  # beside 200 and errors of the API's shape


def describe(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    """The document."""
    bodies = [route.body for route in routes if route.body is not None]
    names, schemas = models_json_schema([(body, "validation") for body in dict.fromkeys(bodies)], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        refs = names[route.body, "validation"] if route.body is not None else None
        paths.setdefault(route.path, {})[route.method] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Expressway", "version": version},
        "paths": paths,
        "components": {
            "schemas": {
                **schemas.get("$defs", {}),
                "OpenAIError": _OPENAI_ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, body: Mapping[str, Any] | None) -> dict[str, Any]:
    error = {"$ref": _REF.format(model="AnthropicError" if route.anthropic else "OpenAIError")}
    content: dict[str, Any] = {_JSON: {"schema": _OBJECT}}
    if route.streams:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status, words in (route.statuses or {}).items():
        responses[status] = {"description": words, "content": {_JSON: {"schema": _OBJECT}}}
    responses["default"] = {"description": "an error, in the shape of its API", "content": {_JSON: {"schema": error}}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    operation["security"] = [{"bearer": []}, {"key": []}] if route.needs_key else []
    return operation
