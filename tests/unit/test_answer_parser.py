"""What models write, taken apart the same however it comes in pieces."""

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.answer_parser import AnswerParser, Content, Reasoning
from coordinator.text.conversation import Tool, ToolCall

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"},
        "x": {"type": ["number", "null"]},
        "list": {"type": "array"}, "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}  # fmt: skip
TOOLS = {"f": Tool.of("f", "does", SCHEMA)}
CALL = "<tool_call>\n<function=f>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>"
CALLED = ToolCall("f", {"path": "/a"})


def parts(pieces, *, tools=TOOLS, in_reasoning=False, thinks=True):
    """All parts, neighbours of a kind joined."""
    parser = AnswerParser(tools, in_reasoning=in_reasoning, thinks=thinks)
    found = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.flush()]:
        if found and not isinstance(part, ToolCall) and type(found[-1]) is type(part):
            found[-1] = type(part)(found[-1].text + part.text)
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [Content("hello")]),
        ("  hello \n", [Content("  hello \n")]),
        ("<think>\nhm\n</think>\n\nhello", [Reasoning("hm"), Content("hello")]),
        ("\n<think></think>hello", [Content("hello")]),
        ("<think>only thought", [Reasoning("only thought")]),
        ("<thinking", [Content("<thinking")]),
        (CALL, [CALLED]),
        (f"I look.\n\n{CALL}\n{CALL}", [Content("I look."), CALLED, CALLED]),
        (f"{CALL} after", [CALLED, Content("after")]),
        (f"<think>let me {CALL}\n", [Reasoning("let me"), CALLED]),
        (f"<think>I write {CALL[:30]} but</think>no", [Reasoning(f"I write {CALL[:30]} but"), Content("no")]),
        ("<think>a <tool_call> b</think>c", [Reasoning("a <tool_call> b"), Content("c")]),
        (f"a {CALL[:40]}", [Content(f"a {CALL[:40]}")]),
        (CALL.removeprefix("<tool_call>\n"), [CALLED]),
        (CALL.replace("</function>\n", ""), [CALLED]),
        (CALL.removesuffix("\n</tool_call>"), [CALLED]),
        ('<tool_call>\n{"name": "f", "arguments": {"path": "/a"}}\n</tool_call>', [CALLED]),
        ('<tool_call>{"name": "f", "arguments": "{\\"path\\": \\"/a\\"}"}</tool_call>', [CALLED]),
        ('<tool_call>{"name": "f", "arguments": {"path": "</tool_call>"}}</tool_call>',
         [ToolCall("f", {"path": "</tool_call>"})]),
        ('<tool_call>{"name": "f", "argu</tool_call> so', [Content('<tool_call>{"name": "f", "argu</tool_call> so')]),
        ('<tool_call>{"name": 7}</tool_call>', [Content('<tool_call>{"name": 7}</tool_call>')]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
         [Content('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')]),
        ("<tool_call>what</tool_call>", [Content("<tool_call>what</tool_call>")]),
        ("<tool_call>\n<function=g>\n</function>\n</tool_call>", [ToolCall("g", {})]),
        ("<tool_call>\n<function=f>\nnoise\n</function>\n</tool_call>",
         [Content("<tool_call>\n<function=f>\nnoise\n</function>\n</tool_call>")]),
        (f'<tool_call>{{"x": NaN}}</tool_call>\n{CALL}', [Content('<tool_call>{"x": NaN}</tool_call>'), CALLED]),
    ],
)  # fmt: skip
def test_what_is_written_and_what_it_is(text, expected):
    assert parts([text]) == expected
    assert parts(text) == expected


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("path", "7", "7"), ("n", "7", 7), ("n", "seven", "seven"), ("on", "True", True), ("on", "false", False),
        ("x", "null", None), ("x", "1.5", 1.5), ("list", '["a"]', ["a"]), ("list", "a", "a"), ("either", "x", "x"),
        ("either", "5", 5), ("either", '"5"', '"5"'), ("unknown", "5", "5"), ("path", "a\n\n b ", "a\n\n b "),
        ("path", "x</parameter>y", "x</parameter>y"),
        ("path", "</function>\n</tool_call>", "</function>\n</tool_call>"),
        ("path", "", ""), ("x", "NaN", "NaN"),
    ],
)  # fmt: skip
def test_values_have_the_type_of_their_schema(name, written, value):
    text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert parts([text]) == parts(text) == [ToolCall("f", {name: value})]


def test_without_tools_a_call_is_text_and_nothing_waits():
    parser = AnswerParser(None, in_reasoning=False, thinks=False)
    assert parser.feed("<tool") == [Content("<tool")]
    assert parser.feed("_call>") == [Content("_call>")]
    assert parts([CALL], tools=None) == [Content(CALL)]


def test_a_prompt_that_opened_the_reasoning():
    assert parts("hm\n</think>\n\nhi", in_reasoning=True) == [Reasoning("hm"), Content("hi")]
    assert parts(["hm"], in_reasoning=True) == [Reasoning("hm")]
    assert parts(f"hm\n</think>\n\n{CALL}", in_reasoning=True) == [Reasoning("hm"), CALLED]


def reasoned(pieces, *, tools=TOOLS, in_reasoning=False):
    """How many characters were reasoning in the end."""
    parser = AnswerParser(tools, in_reasoning=in_reasoning, thinks=True)
    for piece in pieces:
        parser.feed(piece)
    parser.flush()
    return parser.reasoned


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("hm\n</think>\n\nhi", True, len("hm\n</think>")),
        ("<think>hm</think>hi", False, len("<think>hm</think>")),
        ("hm, and no end", True, len("hm, and no end")),
        ("hi", False, 0),
        (f"hm\n</think>\n\n{CALL}", True, len("hm\n</think>")),
        (f"hm\n{CALL}\nhi", True, len("hm\n")),  # a call inside ends it
    ],
)
def test_how_much_was_reasoning(text, in_reasoning, expected):
    assert reasoned([text], in_reasoning=in_reasoning) == expected
    assert reasoned(text, in_reasoning=in_reasoning) == expected


BITS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=path>",
        "</parameter>", "\n", " ", "a", '{"name": "f", "arguments": {"n": "', '"}}', '"', "\\", "<", "é")  # fmt: skip
COUNT = int(os.environ.get("EXPRESSWAY_PARSER_EXAMPLES", "300"))


@settings(max_examples=COUNT)
@given(
    st.lists(st.sampled_from(BITS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_pieces_change_nothing_and_no_word_is_lost(text, cuts, in_reasoning, with_tools):
    options = {"tools": TOOLS if with_tools else None, "in_reasoning": in_reasoning}
    whole = parts([text], **options)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert parts([text[a:b] for a, b in itertools.pairwise(edges)], **options) == whole
    assert parts(text, **options) == whole
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert reasoned(pieces, **options) == reasoned([text], **options) <= len(text)
    if not any(isinstance(part, ToolCall) for part in whole):
        seen = "".join(part.text for part in whole).replace(" ", "").replace("\n", "")
        said = text.replace(" ", "").replace("\n", "")
        for marker in ("<think>", "</think>", "</tool_call>"):
            seen, said = seen.replace(marker, ""), said.replace(marker, "")
        assert seen == said
