"""Grammars as the coordinator writes them, kept by the lane's masks on rows of random logits."""

import bisect
import json
import random
import threading

import numpy as np
import pytest

from coordinator import limits as door
from coordinator.errors import BadRequest, OutOfRange
from coordinator.text.answer_parser import AnswerParser, Content, Reasoning
from coordinator.text.conversation import Tool, ToolCall
from coordinator.text.grammar import Bound, write_grammar
from coordinator.text.tokenizer import Tokenizer
from lanes import limits
from lanes.answer import Answer
from lanes.errors import BadGrammar
from lanes.grammar import Compiling, Grammars
from lanes.request import Request, Sampling
from tests.fakes.doors import VOCAB_SIZE, thinking_dir

SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [Tool.of("look", "d", SCHEMA), Tool.of('odd"name', None, {"type": "object", "additionalProperties": False})]
TOKENIZER = Tokenizer.load(thinking_dir())
END, THINK_END = 2, 4


@pytest.fixture(scope="module")
def grammars():
    return Grammars(thinking_dir() / "tokenizer.json", VOCAB_SIZE + 16, (END,))


def write(bound, tools=(), **options):
    return write_grammar(bound, tools, TOKENIZER, **{"in_reasoning": False, "parallel": True, **options})


def answer(grammars, grammar, seed, *, most=400, cut=0, sampling=None):
    """The tokens of an answer to random logits; after `cut` of them another lane goes on."""
    rows = np.random.default_rng(seed).standard_normal((most, VOCAB_SIZE + 16)).astype(np.float32)
    rows[:, (END, THINK_END)] += 3.0
    output = []

    def begin():
        request = Request(
            "r", (1, *output), most + len(output), sampling or Sampling(1.0, seed=seed), frozenset({END}),
            replayed_tokens=len(output), grammar=grammar,
        )  # fmt: skip
        return Answer(request, VOCAB_SIZE + 16, grammars.begin(grammar, request.replayed_ids, [END]).result())

    drawing = begin()
    while len(output) < most:
        if cut and len(output) == cut:
            drawing = begin()
        output.append(drawing.draw(rows[len(output)]).id)
        if drawing.end():
            break
    return output


def text_of(ids):
    assert TOKENIZER is not None
    return b"".join(map(TOKENIZER.token_bytes, ids)).decode()


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_is_json_of_the_schema(grammars, seed):
    ids = answer(grammars, write(Bound("f", SCHEMA)), seed)
    assert ids[-1] == END
    value = json.loads(text_of(ids))
    assert set(value) == {"n", "ok"}
    assert type(value["n"]) is int
    assert value["n"] <= 99


def test_without_a_grammar_the_same_rows_are_no_json(grammars):
    assert text_of(answer(grammars, "start: /(.|\\n)*/", 0))[:1] != "{"


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_is_a_call_after_the_reasoning(grammars, seed):
    bound = Bound("f", must_call=tuple(tool.name for tool in TOOLS))
    grammar = write(bound, TOOLS, in_reasoning=True, parallel=False)
    ids = answer(grammars, grammar, seed)
    parser = AnswerParser({tool.name: tool for tool in TOOLS}, in_reasoning=True, thinks=True)
    parts = [*parser.feed(text_of(ids)), *parser.flush()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert len(calls) == 1
    assert not [part for part in parts if isinstance(part, Content)]
    assert all(isinstance(part, Reasoning | ToolCall) for part in parts)
    if calls[0].name == "look":
        assert set(calls[0].arguments) == {"n", "ok"}
    else:
        assert calls == [ToolCall('odd"name', {})]


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_goes_on_as_the_lost_lane_would_have(grammars, seed):
    grammar = write(Bound("f", SCHEMA))
    whole = answer(grammars, grammar, seed)
    for cut in random.Random(seed).sample(range(1, len(whole)), 2):
        assert answer(grammars, grammar, seed, cut=cut) == whole


def test_one_tool_of_several(grammars):
    for seed in range(4):
        ids = answer(grammars, write(Bound("f", must_call=("look",)), TOOLS, parallel=False), seed)
        assert '"name": "look"' in text_of(ids)


def test_a_least_length_yields_to_the_grammar(grammars):
    ids = answer(grammars, write(Bound("f", {"const": 7})), 0, sampling=Sampling(min_tokens=50))
    assert json.loads(text_of(ids)) == 7


def test_json_or_a_call_when_both_may_come(grammars):
    grammar = write(Bound("f", {"const": 7}), TOOLS)
    kinds = {text_of(answer(grammars, grammar, seed)).strip()[:1] for seed in range(20)}
    assert kinds == {"7", "<"}


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/none"}, {"pattern": "(", "type": "string"}])
def test_a_schema_that_cannot_be_kept_is_the_clients_error(schema):
    with pytest.raises(BadRequest) as caught:
        write(Bound("response_format", schema))
    assert caught.value.param == "response_format"


def test_schemas_are_bounded(monkeypatch):
    grammar = write(Bound("f", SCHEMA))
    assert door.GRAMMAR_BYTES <= limits.MAX_GRAMMAR_BYTES
    monkeypatch.setattr(door, "GRAMMAR_BYTES", len(grammar))
    write(Bound("f", SCHEMA))
    monkeypatch.setattr(door, "GRAMMAR_BYTES", len(grammar) - 1)
    with pytest.raises(OutOfRange):
        write(Bound("f", SCHEMA))


def chain(links):
    """Each definition refers to the next: 3 levels a link."""
    more = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(links)}
    return {"$defs": {**more, f"d{links}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def test_references_are_bounded(monkeypatch):
    levels = 5 + 3 * 20 + 1  # the schema's own, those of 20 links, and of the end
    monkeypatch.setattr(door, "SCHEMA_LEVELS", levels)
    write(Bound("f", chain(20)))
    monkeypatch.setattr(door, "SCHEMA_LEVELS", levels - 1)
    with pytest.raises(OutOfRange):
        write(Bound("f", chain(20)))


@pytest.mark.parametrize("links", [door.SCHEMA_LEVELS // 3, 3_000, 15_000])
def test_a_chain_that_would_overflow_the_stack_is_refused(links):
    for bound, tools in (
        (Bound("f", chain(links)), ()),
        (Bound("f", must_call=("t",)), [Tool.of("t", "", chain(links))]),
    ):
        with pytest.raises(OutOfRange) as caught:
            write(bound, tools)
        assert caught.value.param == "f"


SELF = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"n": SELF}, **SELF},
        {"$defs": {"n": {"$ref": "#/$defs/m"}, "m": SELF}, "type": "object", "properties": {"a": SELF}},
        {"$defs": {"n": {"type": "object", "allOf": [{"type": "object"}, SELF]}}, **SELF},
        {"$defs": {"n": {"anyOf": [SELF, {"oneOf": [SELF, {"allOf": [SELF]}]}]}}, **SELF},
    ],
)
def test_a_schema_that_is_nothing_but_itself_is_refused(schema):
    with pytest.raises(BadRequest, match="nothing but a reference to itself"):
        write(Bound("f", schema))


@pytest.mark.parametrize(
    "node",
    [
        {"anyOf": [{"type": "null"}, {"type": "array", "items": SELF}]},
        {"anyOf": [SELF, {"type": "null"}]},
        {"type": "object", "properties": {"next": {"allOf": [SELF]}}},
    ],
)
def test_a_schema_that_ends_somewhere_may_refer_to_itself(node):
    write(Bound("f", {"$defs": {"n": node}, **SELF}))


def test_a_schema_that_refers_to_itself_is_kept():
    node = {"type": "object", "properties": {"left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#/$defs/n"}}}
    write(Bound("f", {"$defs": {"n": node}, "$ref": "#/$defs/n"}))
    write(Bound("f", chain(door.SCHEMA_LEVELS // 3 - 2)))


def patterns(count):
    return [{"type": "string", "pattern": f"^.{{0,{n}}}a"} for n in range(count)]


def test_patterns_of_one_value_are_bounded():
    write(Bound("f", {"allOf": patterns(door.SCHEMA_PATTERNS)}))
    write(Bound("f", {"anyOf": patterns(50)}))
    write(Bound("f", {"type": "object", "properties": dict(zip("abcdefghijklmnopqrst", patterns(20), strict=True))}))
    linked = {f"d{n}": {**one, "$ref": f"#/$defs/d{n + 1}"} for n, one in enumerate(patterns(50))}
    for schema in (
        {"allOf": patterns(door.SCHEMA_PATTERNS + 1)},
        {"$defs": {**linked, "d50": {"type": "string"}}, "$ref": "#/$defs/d0"},
    ):
        with pytest.raises(OutOfRange):
            write(Bound("f", schema))


def test_looking_for_patterns_is_bounded(monkeypatch):
    monkeypatch.setattr(door, "SCHEMA_STEPS", 3)
    write(Bound("f", {"allOf": patterns(2)}))
    monkeypatch.setattr(door, "SCHEMA_STEPS", 2)
    with pytest.raises(OutOfRange):
        write(Bound("f", {"allOf": patterns(2)}))


def numbers(count):
    return {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}


def test_properties_are_bounded(monkeypatch):
    monkeypatch.setattr(door, "SCHEMA_PROPERTIES", 20)
    write(Bound("f", {"anyOf": [numbers(10), numbers(10)]}))
    for bound, tools in (
        (Bound("f", {"anyOf": [numbers(10), numbers(11)]}), ()),
        (Bound("f", must_call=("t",)), [Tool.of("t", "", numbers(21))]),
    ):
        with pytest.raises(OutOfRange):
            write(bound, tools)


def test_symbols_are_bounded_at_the_door_and_in_a_lane(monkeypatch):
    assert door.GRAMMAR_SYMBOLS <= limits.MAX_GRAMMAR_SYMBOLS
    grammar = write(Bound("f", numbers(50)))

    def at_the_door():
        write(Bound("f", numbers(50)))

    def in_a_lane():
        Grammars(thinking_dir() / "tokenizer.json", VOCAB_SIZE, (END,)).begin(grammar, (), [END]).result()

    def refused(symbols):
        monkeypatch.setattr(door, "GRAMMAR_SYMBOLS", symbols)
        monkeypatch.setattr(limits, "MAX_GRAMMAR_SYMBOLS", symbols)
        found = []
        for ask, error in ((at_the_door, BadRequest), (in_a_lane, BadGrammar)):
            try:
                ask()
                found.append(False)
            except error:
                found.append(True)
        assert found[0] or not found[1], "a lane takes what a door took"
        return found

    bounds = range(1, 1001)
    assert refused(bounds[0]) == [True, True]
    assert refused(bounds[-1]) == [False, False]
    for side in (0, 1):
        edge = bisect.bisect_left(bounds, True, key=lambda symbols: not refused(symbols)[side])
        assert (refused(bounds[edge])[side], refused(bounds[edge - 1])[side]) == (False, True)


def test_a_compilation_is_waited_for_until_a_limit_or_a_cancel(monkeypatch):
    go_on = threading.Event()
    slow = Compiling(lambda: go_on.wait(60) and "made")
    assert slow.result(lambda: True) is None
    monkeypatch.setattr(limits, "GRAMMAR_COMPILE_S", 0.05)
    with pytest.raises(BadGrammar, match="too long"):
        slow.result()
    go_on.set()
    monkeypatch.setattr(limits, "GRAMMAR_COMPILE_S", 60.0)
    assert slow.result() == "made"

    def broken():
        raise RuntimeError("of the library")

    with pytest.raises(BadGrammar):
        Compiling(broken).result()


def test_what_a_client_names_stays_a_name(grammars):
    evil = 'x"\nstart: /.*/\n"'
    grammar = write(Bound("f", must_call=(evil,)), [Tool.of(evil, None, {"const": {}})])
    assert grammar.count("\nstart:") == 0
    assert json.loads(text_of(answer(grammars, grammar, 1)).split("\n")[1])["name"] == evil


@pytest.mark.parametrize("grammar", ["start: (", "start: nothing", "%json", "x" * 100])
def test_a_lane_refuses_what_is_no_grammar(grammars, grammar):
    with pytest.raises(BadGrammar):
        grammars.begin(grammar, (), [END]).result()
    with pytest.raises(BadGrammar):
        grammars.begin(write(Bound("f", SCHEMA)), (60, 61, 62), [END]).result()


def test_a_tokenizer_over_the_limit_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_bytes((thinking_dir() / "tokenizer.json").read_bytes())
    monkeypatch.setattr(limits, "MAX_TOKENIZER_BYTES", file.stat().st_size)
    Grammars(file, VOCAB_SIZE, (END,)).begin('start: "a"', (), [END]).result()
    monkeypatch.setattr(limits, "MAX_TOKENIZER_BYTES", file.stat().st_size - 1)
    with pytest.raises(BadGrammar):
        Grammars(file, VOCAB_SIZE, (END,)).begin('start: "a"', (), [END]).result()
    with pytest.raises(BadGrammar):
        Grammars(tmp_path / "none", VOCAB_SIZE, (END,)).begin('start: "a"', (), [END]).result()
