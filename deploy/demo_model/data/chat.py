"""Conversations made from functions and their docstrings, in the chat format of the Qwen family.

Three shapes, chosen by a hash of the function: a request and its code; the same with a few words of thinking, when the
system turn asks for it; a tool call that reads the file, its result, and an answer. Specials are written by name: the
tokenizer's added tokens; a function whose own text holds one is left out. Not here: rendering for the server.
"""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.demo_model.data.documents import SPECIAL, Document

FUNCTION_LINES = (3, 45)
SUMMARY_CHARS = (20, 240)
THINK_SYSTEM = "Think before you answer."
TOOLS_SYSTEM = (
    "You can call tools. To call one, answer with a JSON object between <tool_call> and </tool_call>.\n"
    '{"name": "read_file", "parameters": {"path": "string"}}'
)
_ASKS = (
    "Write a Python function `{name}` that does this: {summary}",
    "Write a function {name}({arguments}). {summary}",
    "{summary}\n\nPlease write this as a Python function named {name}.",
    "Can you write `{name}({arguments})`? {summary}",
)


@dataclass(frozen=True, slots=True)
class Function:
    """A documented function of a file."""

    name: str
    arguments: str
    summary: str  # first paragraph of its docstring, one line
    code: str  # dedented, as in the file


def functions(source: str) -> Iterator[Function]:
    """The functions of a Python file that are short, public, documented and hold no special token."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    members = (node for top in tree.body for node in (top.body if isinstance(top, ast.ClassDef) else [top]))
    for node in members:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test")) or node.end_lineno is None:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        size = code.count("\n")
        if not (
            FUNCTION_LINES[0] <= size <= FUNCTION_LINES[1] and SUMMARY_CHARS[0] <= len(summary) <= SUMMARY_CHARS[1]
        ):
            continue
        if not summary.isascii() or ":param" in summary or SPECIAL.search(code) or node.decorator_list:
            continue
        arguments = ", ".join(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        yield Function(node.name, arguments, summary, code)


def turn(role: str, content: str) -> str:
    """One turn, as the server renders it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def conversation(function: Function, path: str) -> str:
    """The conversation about one function."""
    pick = hashlib.sha256(f"{path}:{function.name}".encode()).digest()
    ask = _ASKS[pick[0] % len(_ASKS)].format(name=function.name, arguments=function.arguments, summary=function.summary)
    code = f"```python\n{function.code}```"
    shape = pick[1] % 8
    if shape < 6:
        return turn("user", ask) + turn("assistant", code)
    if shape == 6:
        takes = f"It takes {function.arguments}." if function.arguments else "It takes no arguments."
        thought = f"A function named {function.name} is wanted. {takes} {function.summary}"
        return (
            turn("system", THINK_SYSTEM)
            + turn("user", ask)
            + turn("assistant", f"<think>\n{thought}\n</think>\n\n{code}")
        )
    call = json.dumps({"name": "read_file", "arguments": {"path": path}})
    return (
        turn("system", TOOLS_SYSTEM)
        + turn("user", f"What does the function {function.name} in {path} do?")
        + turn("assistant", f"<tool_call>\n{call}\n</tool_call>")
        + turn("user", f"<tool_response>\n{function.code}</tool_response>")
        + turn("assistant", function.summary)
    )


def conversations(document: Document) -> list[Document]:
    """The conversations of a code document, one document each."""
    return [
        Document(document.source, f"{document.path}:{f.name}", "chat", conversation(f, document.path))
        for f in functions(document.text)
    ]
