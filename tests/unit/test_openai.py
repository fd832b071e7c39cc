from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.apis.json_body import parse_json
from coordinator.apis.openai.bodies import parse_completion
from coordinator.apis.openai.chat import parse_chat
from coordinator.errors import BadRequest, CoordinatorError, OutOfRange, Unsupported
from coordinator.sampling import Wanted
from coordinator.text.conversation import ChatMessage, Thinking, ToolCall

HELLO = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> Any:
    return parse_chat(parse_json(json.dumps({"messages": [HELLO], **fields}).encode()))


def completion(**fields: Any) -> Any:
    return parse_completion(parse_json(json.dumps({"prompt": "hello", **fields}).encode()))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff{}", b"{}{}", b"{'a': 1}",
        b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": "\\ud800"}', b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\x01"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_not_an_acceptable_json_object(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_json(data)


def test_depth_at_the_limit_and_over_it() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    parse_json(nested(limits.JSON_DEPTH))
    with pytest.raises(BadRequest, match="nested"):
        parse_json(nested(limits.JSON_DEPTH + 1))


_jsonish = st.text(alphabet='{}[]":,truefalsn0123456789.eE+- \\u', max_size=60).map(str.encode)


@given(data=st.binary(max_size=60) | _jsonish)
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        value = parse_json(data)
    except CoordinatorError:
        return
    assert isinstance(value, dict)


_leaf = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
_names = st.sampled_from(["role", "content", "type", "text", "x"])
_json = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3), max_leaves=6
)
_fields = st.sampled_from(
    [
        *(
            "messages",
            "prompt",
            "stop",
            "n",
            "max_tokens",
            "temperature",
            "stream",
            "stream_options",
            "logprobs",
            "tools",
        ),
        *("logit_bias", "min_p", "presence_penalty", "min_tokens", "ignore_eos"),
    ]
)


@given(value=st.dictionaries(_fields, _json, max_size=5), is_chat=st.booleans())
def test_any_object_is_parsed_or_refused_with_a_field(value: dict[str, Any], is_chat: bool) -> None:
    try:
        body = parse_chat(value) if is_chat else parse_completion(value)
        if not is_chat:
            body.one_prompt()
            body.wanted()
    except CoordinatorError as error:
        refusal = error
    else:
        return
    assert (refusal.http, bool(refusal.param)) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [HELLO, {"content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 7}, "model"),
        ({"min_p": "0.1"}, "min_p"),
        ({"min_tokens": 1.0}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"repetition_penalty": [1.1]}, "repetition_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids.0"),
    ],
)  # fmt: skip
def test_wrong_types_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("n", 0), ("functions", [{}]),
        ("best_of", 2), ("modalities", ["audio"]), ("audio", {}),
        ("chat_template", "x"), ("continue_final_message", True),
        ("add_generation_prompt", False), ("guided_json", {}), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(Unsupported) as caught:
        chat(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("n", 2)])
def test_the_same_for_completions(name: str, value: object) -> None:
    with pytest.raises(Unsupported) as caught:
        completion(**{name: value})
    assert caught.value.param == name


def test_values_that_change_nothing_and_unknown_fields_are_accepted() -> None:
    chat(
        n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, presence_penalty=0, logit_bias=None,
        user="me", store=True, metadata={"a": "b"}, parallel_tool_calls=True, service_tier="auto", what={"ever": [1]},
    )  # fmt: skip
    completion(echo=False, suffix=None, best_of=1, n=1, user="me", frequency_penalty=0.0)


def test_false_is_not_zero_nor_true_one() -> None:
    for value in (False, True):
        with pytest.raises(Unsupported):
            chat(best_of=value)
        with pytest.raises(BadRequest):
            chat(presence_penalty=value)
        with pytest.raises(BadRequest):
            chat(logit_bias={"5": value})
    with pytest.raises(BadRequest):
        chat(n=True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", "hello"), ("", ""), (["hello"], "hello"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], []), ([[]], []),
    ],
)  # fmt: skip
def test_prompts(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).one_prompt() == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_one_prompt_per_request(prompt: object) -> None:
    with pytest.raises(Unsupported, match="one prompt") as caught:
        completion(prompt=prompt).one_prompt()
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 5, True, [1, "a"], [1.5], [True], {"a": 1}, [["a"]], [[1], "a"]])
def test_prompts_of_other_types(prompt: object) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").split(".")[0] == "prompt"


def test_a_missing_prompt_and_no_messages() -> None:
    with pytest.raises(BadRequest, match="is required"):
        parse_completion({})
    with pytest.raises(BadRequest, match="is required"):
        parse_chat({})
    with pytest.raises(BadRequest, match="at least one"):
        chat(messages=[])


def test_how_tokens_are_to_be_drawn() -> None:
    said = {
        "temperature": 0.5, "top_k": -1, "top_p": 0.75, "min_p": 0.1, "seed": -5, "repetition_penalty": 1.1,
        "presence_penalty": 1, "frequency_penalty": -1.5, "min_tokens": 3,
    }  # fmt: skip
    for wanted in (
        chat(**said, logit_bias={"50256": -100, "0": 1.5}).wanted, completion(**said, logit_bias={"0": 1.5}).wanted(),
    ):  # fmt: skip
        assert {name: getattr(wanted, name) for name in said} == said
        assert wanted.logit_bias[0] == 1.5
    assert chat().wanted == completion().wanted() == Wanted()
    assert chat(logit_bias=None, ignore_eos=None).wanted == Wanted()


@pytest.mark.parametrize("key", ["", "a", "05", "+5", "-5", "5.0", " 5", "5\n", "٥", "12345678901", "0x1"])
def test_keys_of_biases_have_one_spelling(key: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"


def test_the_number_of_biases_is_looked_at_first() -> None:
    assert len(chat(logit_bias={str(n): 1 for n in range(limits.LOGIT_BIASES)}).wanted.logit_bias) == 300
    with pytest.raises(OutOfRange) as caught:
        chat(logit_bias={str(n): "wrong" for n in range(limits.LOGIT_BIASES + 1)})
    assert caught.value.param == "logit_bias"


def test_the_newer_name_of_max_tokens_wins() -> None:
    def most(ask: Any) -> tuple[int | None, str]:
        return ask.max_tokens, ask.max_tokens_param

    assert completion(max_tokens=5).most_tokens == most(chat(max_tokens=5)) == (5, "max_tokens")
    newer = {"max_tokens": 5, "max_completion_tokens": 7}
    assert completion(**newer).most_tokens == most(chat(**newer)) == (7, "max_completion_tokens")
    assert completion().most_tokens == most(chat()) == (None, "max_tokens")


def test_turns() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {"role": "assistant", "content": "c"},
            {"role": "tool", "content": "7", "tool_call_id": "t"},
        ]
    )
    assert body.conversation.messages == [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c"),
        ChatMessage("tool", "7"),
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages.0.content.0.type",
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages.0.tool_calls.0.function"),
        ({"role": "user"}, "messages.0.content"),
    ],
)
def test_turns_that_cannot_be_served(message: dict[str, Any], param: str) -> None:
    with pytest.raises((Unsupported, BadRequest)) as caught:
        chat(messages=[message])
    assert caught.value.param == param


def test_the_number_of_messages() -> None:
    assert len(chat(messages=[HELLO] * limits.MESSAGES).conversation.messages) == limits.MESSAGES
    with pytest.raises(OutOfRange):
        chat(messages=[HELLO] * (limits.MESSAGES + 1))


def test_alternatives_need_log_probabilities() -> None:
    with pytest.raises(BadRequest) as caught:
        chat(top_logprobs=3)
    assert caught.value.param == "top_logprobs"


def test_errors_quote_nothing_of_the_body() -> None:
    secret = "the-secret-prompt"
    for fields in ({"messages": [{"role": secret, "content": secret}]}, {"stop": [5, secret]}, {"seed": secret}):
        with pytest.raises(CoordinatorError) as caught:
            chat(**fields)
        assert secret not in caught.value.message
    with pytest.raises(CoordinatorError) as caught:
        parse_json(b'{"messages": "the-secret-prompt')
    assert secret not in caught.value.message


def test_millions_of_mistakes_cost_one_error() -> None:
    with pytest.raises(BadRequest) as caught:
        completion(prompt=[None] * 100_000)
    assert caught.value.param == "prompt.0"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


def test_tools_and_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    asked = chat(
        tools=[TOOL],
        messages=[
            HELLO,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
        ],
    )
    assert [tool.declared for tool in asked.conversation.tools] == [TOOL]
    assert asked.conversation.messages[1] == ChatMessage("assistant", "", "hm", (ToolCall("f", {"a": [1]}),))
    assert asked.parallel
    assert not chat(parallel_tool_calls=False).parallel
    assert chat(tools=[TOOL], tool_choice="none").conversation.tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "web"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "a>b"}}]}, "tools.0.name"),
        ({"tools": [TOOL] * (limits.TOOLS + 1)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"reasoning_effort": "x"}}, "chat_template_kwargs.reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages.0.tool_calls.0.function.arguments"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_served(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((Unsupported, BadRequest, OutOfRange)) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_how_much_to_think() -> None:
    assert chat().conversation.thinking == Thinking()
    assert chat(reasoning_effort="none").conversation.thinking == Thinking(on=False)
    assert chat(reasoning_effort="high").conversation.thinking == Thinking(effort="xhigh")
    options = {"enable_thinking": False, "preserve_thinking": False, "reasoning_effort": "low"}
    assert chat(chat_template_kwargs=options).conversation.thinking == Thinking(False, "low", False)
