"""Writes docs/reference from the code: commands, HTTP routes and bodies, gRPC messages, the Python client.

    python -m scripts.reference docs/reference

Not here: what people need to know beyond names and types (the guide). Invariant: the same code gives the same pages; a
test holds them to it.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from bench.__main__ import main as bench
from coordinator.channel import Trust
from coordinator.cli import COMMANDS, commands
from coordinator.client import Client
from coordinator.doors.http import document

PROTO = Path(__file__).parents[1] / "proto"
MADE = "Made from the code by `scripts/gen-reference`; a test keeps it true.\n"
_KINDS = {
    number: name.removeprefix("TYPE_").lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {"commands.md": _commands(), "http.md": _http(), "grpc.md": _grpc(), "client.md": _client()}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |\n" for line in lines
    )


# --- commands


def _commands() -> str:
    context = click.Context(commands, info_name="expressway")
    text = [f"# Commands\n\n{MADE}"]
    for name in COMMANDS:
        command = bench if name == "bench" else commands.get_command(context, name)
        assert command is not None
        text += _command(command, click.Context(command, info_name=f"expressway {name}", parent=None))
    return "\n".join(text)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.info_name}\n\n`{context.info_name} {usage}`\n\n{inspect.cleandoc(command.help or '')}\n"
    options = [
        found for each in command.params if (found := each.get_help_record(context)) and isinstance(each, click.Option)
    ]
    if options:
        yield _table(("option", "what"), [(f"`{name}`", what) for name, what in options])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _command(below, click.Context(below, info_name=f"{context.info_name} {name}"))


# --- HTTP


def _http() -> str:
    told = document()
    text = [
        f"# HTTP\n\n{MADE}\n`GET /openapi.json` says the same to programs; what fields mean: [the doors](../api.md).\n"
    ]
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            text.append(f"## {method.upper()} {path}\n\n{operation['summary']}\n")
            if body := operation.get("requestBody"):
                text.append(f"Body: {_type(body['content']['application/json']['schema'])}.\n")
            answers = [
                (status, each["description"], ", ".join(each["content"]))
                for status, each in operation["responses"].items()
            ]
            text.append(_table(("status", "", "content"), answers))
    text.append("## Bodies\n\nFields without a type take any JSON. Other fields than these are ignored.\n")
    for name, schema in told["components"]["schemas"].items():
        text.append(f"### {name}\n\n{schema.get('description', '')}".rstrip() + "\n")
        required = schema.get("required", ())
        rows = [
            (f"`{field}`", _type(each), "yes" if field in required else "")
            for field, each in schema.get("properties", {}).items()
        ]
        if rows:
            text.append(_table(("field", "type", "required"), rows))
    return "\n".join(text)


def _type(schema: dict[str, Any]) -> str:
    """In words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(kind)


# --- gRPC


def _grpc() -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        words = ["", f"-I{PROTO}", "--include_source_info", "--include_imports", f"--descriptor_set_out={out}"]
        if protoc.main([*words, str(PROTO / "laneproto/v1/serve.proto")]):
            raise RuntimeError("protoc failed")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    text = [f"# gRPC\n\n{MADE}\nHow to use it: [gRPC tools](../grpc-tools.md).\n"]
    needed = _needed(files)
    for file in reversed(files):  # the public door first, then what it takes from the lanes' protocol
        said = {
            tuple(each.path): (each.leading_comments, each.trailing_comments) for each in file.source_code_info.location
        }
        for place, service in enumerate(file.service):
            if file.name.endswith("serve.proto"):
                text.append(f"## {file.package}.{service.name}\n")
                rows = []
                for k, method in enumerate(service.method):
                    gives = ("stream of " if method.server_streaming else "") + _link(method.output_type)
                    rows.append(
                        (f"`{method.name}`", _link(method.input_type), gives, _comment(said.get((6, place, 2, k))))
                    )
                text.append(_table(("method", "takes", "gives", ""), rows))
        for place, message in enumerate(file.message_type):
            if f".{file.package}.{message.name}" in needed:
                text.append(f"### {message.name}\n\n{_comment(said.get((4, place)))}".rstrip() + "\n")
                rows = [
                    (f"`{field.name}`", _field(field, message), _comment(said.get((4, place, 2, k))))
                    for k, field in enumerate(message.field)
                ]
                text += [_table(("field", "type", ""), rows)] if rows else []
        for place, enum in enumerate(file.enum_type):
            if f".{file.package}.{enum.name}" in needed:
                text.append(f"### {enum.name}\n\n{_comment(said.get((5, place)))}".rstrip() + "\n")
                values = [(f"`{v.name}`", _comment(said.get((5, place, 2, k)))) for k, v in enumerate(enum.value)]
                text.append(_table(("value", ""), values))
    return "\n".join(text)


def _needed(files: Any) -> set[str]:
    """Messages and enums of the public door, and those of the lanes' protocol that it uses."""
    fields = {f".{file.package}.{message.name}": message.field for file in files for message in file.message_type}
    found: set[str] = set()
    left = [name for file in files if file.name.endswith("serve.proto") for name in
            (f".{file.package}.{each.name}" for each in (*file.message_type, *file.enum_type))]  # fmt: skip
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [field.type_name for field in fields.get(name, ()) if field.type_name]
    return found


def _field(field: descriptor_pb2.FieldDescriptorProto, message: descriptor_pb2.DescriptorProto) -> str:
    nested = {f"{each.name}": each for each in message.nested_type if each.options.map_entry}
    if entry := nested.get(field.type_name.rpartition(".")[2]):
        return f"map of {_field(entry.field[0], entry)} to {_field(entry.field[1], entry)}"
    kind = _link(field.type_name) if field.type_name else _KINDS[field.type]
    if field.label == field.LABEL_REPEATED:
        return f"list of {kind}"
    if field.HasField("oneof_index") and not field.proto3_optional:
        return f"{kind}, one of {message.oneof_decl[field.oneof_index].name}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})"


def _comment(said: tuple[str, str] | None) -> str:
    return " ".join(" ".join(said).split()) if said else ""


# --- the client


def _client() -> str:
    text = [f"# The Python client\n\n{MADE}\n`coordinator.client`; examples: [gRPC tools](../grpc-tools.md).\n"]
    for kind in (Client, Trust):
        text.append(f"## {kind.__name__}\n\n`{kind.__name__}{_signature(kind)}`\n\n{_doc(kind)}\n")
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                text.append(f"### {kind.__name__}.{name}\n\n`{name}{_signature(method)}`\n\n{_doc(method)}\n")
    return "\n".join(text)


def _signature(what: Any) -> str:
    """As it is written, without the words that say nothing to a caller."""
    shown = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"asyncio.\1", str(inspect.signature(what)))
    return shown.replace("'", "").replace("(self, ", "(").replace("(self)", "()").removesuffix(" -> None")


def _doc(what: Any) -> str:
    return inspect.getdoc(what) or ""


def main(folder: Path) -> None:
    """Writes the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
