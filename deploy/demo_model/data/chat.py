"""Conversations made from functions and their docstrings, in the very text that the server renders.

Three shapes, chosen by a hash of the function: a request and its code; the same after a few words of thinking; a tool
call that reads the file, its result, and an answer. Specials are written by name, as the tokenizer's added tokens; a
function whose own text holds one is left out. Not here: the format (`coordinator.text.renderer`).
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import ChatMessage, Conversation, Thinking, Tool, ToolCall
from coordinator.text.renderer import IM_END, THINK_END, PlainText, render
from deploy.demo_model.data.documents import SPECIAL, Document

FUNCTION_LINES = (3, 45)
SUMMARY_CHARS = (20, 240)
FORMAT = ChatFormat(thinks=True)  # what the tokenizer's chat template says
READ_FILE = Tool.of(
    "read_file",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
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
    """The functions (no methods) of a Python file that are short, public, documented and hold no special token."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in tree.body:  # methods make little sense alone
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


def text_of(conversation: Conversation, answer: str) -> str:
    """A conversation and its answer, as the model reads and writes them."""
    segments = render(conversation, FORMAT)
    prompt = "".join(segment.text if isinstance(segment, PlainText) else segment.name for segment in segments)
    return f"{prompt}{answer}{IM_END}\n"


def conversation(function: Function, path: str) -> str:
    """The conversation about one function."""
    pick = hashlib.sha256(f"{path}:{function.name}".encode()).digest()
    ask = _ASKS[pick[0] % len(_ASKS)].format(name=function.name, arguments=function.arguments, summary=function.summary)
    shape = pick[1] % 16
    if shape == 15:
        question = ChatMessage("user", f"What does the function {function.name} in {path} do?")
        call = ChatMessage("assistant", "", calls=(ToolCall(READ_FILE.name, {"path": path}),))
        turns = (question, call, ChatMessage("tool", function.code))
        return text_of(Conversation(turns, (READ_FILE,), Thinking(on=False)), function.summary)
    code = f"```python\n{function.code}```"
    if shape < 7:
        return text_of(Conversation((ChatMessage("user", ask),), (), Thinking(on=False)), code)
    takes = f"It takes {function.arguments}." if function.arguments else "It takes no arguments."
    thought = f"A function named {function.name} is wanted. {takes} {function.summary}"
    return text_of(Conversation((ChatMessage("user", ask),)), f"{thought}\n{THINK_END}\n\n{code}")


def conversations(document: Document) -> list[Document]:
    """The conversations of a code document, one document each."""
    return [
        Document(document.source, f"{document.path}:{f.name}", "chat", conversation(f, document.path))
        for f in functions(document.text)
    ]
