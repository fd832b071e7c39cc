"""What OpenAI clients send: JSON into typed bodies, and typed bodies into what is asked of the model.

Types are checked here (strictly: "5" is not 5), values by `request.check`. Fields that would change the answer and are
not supported are refused by name; other unknown fields are ignored, as the API's clients expect.

Not here: what is answered (openai_answers), HTTP. Invariant: an error names fields and quotes nothing else of the body.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

from coordinator import limits
from coordinator.errors import BadRequest, OutOfRange, Unsupported
from coordinator.request import check_one
from coordinator.sampling import Wanted
from coordinator.text.renderer import ChatMessage, Role

_B = TypeVar("_B", bound="_Body")
_T = TypeVar("_T")

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_List = Annotated[list[_T], Field(fail_fast=True)]  # a list of millions of wrong entries is one error, not millions


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Strict):
    """How a stream is sent."""

    include_usage: bool | None = None


class _Body(_Strict):
    """What both endpoints have."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # an extension, as the next two
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None  # an extension, as the next
    ignore_eos: bool | None = None
    stop: str | _List[str] | None = None
    stop_token_ids: _List[int] | None = None  # an extension
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        """The greatest number of tokens, and the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def wanted(self) -> Wanted:
        """How tokens are to be drawn."""
        return Wanted(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def _token_id(key: str) -> int:
    """Keys of JSON objects are strings; only one spelling, so that no token has two biases."""
    if not _TOKEN_ID.fullmatch(key):
        raise BadRequest("the keys of logit_bias are token ids", param="logit_bias")
    return int(key)


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    logprobs: int | None = None

    def one_prompt(self) -> str | list[int]:
        """The prompt; lists of one are opened."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Unsupported("one prompt per request", param="prompt")
            return prompt[0]
        return prompt  # type: ignore[return-value]  # a list whose first entry is an id is a list of ids


class TextPart(_Strict):
    """Content in parts: only text."""

    type: Literal["text"]
    text: str


class _OtherPart(_Strict):
    type: str


def _part_kind(part: object) -> str:
    return "a text part" if isinstance(part, dict) and part.get("type") == "text" else "a part"


_Part = Annotated[
    Annotated[TextPart, pydantic.Tag("a text part")] | Annotated[_OtherPart, pydantic.Tag("a part")],
    pydantic.Discriminator(_part_kind),
]


class Message(_Strict):
    """One turn. `developer` is the newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[_Part] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    def checked(self, place: int) -> ChatMessage:
        """The turn as text; `place` names it in errors."""
        where = f"messages.{place}"
        if self.tool_calls or self.function_call:
            raise Unsupported("tool calls are not supported", param=f"{where}.tool_calls")
        if self.content is None:
            raise BadRequest("content is required", param=f"{where}.content")
        role: Role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return ChatMessage(role, self.content)
        texts = []
        for number, part in enumerate(self.content):
            if not isinstance(part, TextPart):
                raise Unsupported("only text parts are supported", param=f"{where}.content.{number}.type")
            texts.append(part.text)
        return ChatMessage(role, "".join(texts))


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: _List[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def conversation(self) -> list[ChatMessage]:
        """The turns as text."""
        if not self.messages:
            raise BadRequest("at least one message is required", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
        return [message.checked(place) for place, message in enumerate(self.messages)]


def parse_json(data: bytes) -> dict[str, Any]:
    """One JSON object: UTF-8, no NaN or Infinity, bounded depth."""
    if not data:
        raise BadRequest("a JSON body is required")
    try:
        value = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {_without_input(error)}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    _check_depth(value)
    return value


def parse_completion(value: dict[str, Any]) -> CompletionBody:
    """The body of /v1/completions."""
    _refuse_unsupported(value, _COMMON_REFUSALS | _COMPLETION_REFUSALS)
    return _parse(CompletionBody, value)


def parse_chat(value: dict[str, Any]) -> ChatBody:
    """The body of /v1/chat/completions."""
    _refuse_unsupported(value, _COMMON_REFUSALS | _CHAT_REFUSALS)
    messages = value.get("messages")
    if isinstance(messages, list) and len(messages) > limits.MESSAGES:  # before they are looked at
        raise OutOfRange(f"at most {limits.MESSAGES} messages", param="messages")
    return _parse(ChatBody, value)


# Fields that change the answer and are not supported -> the values that change nothing.
_COMMON_REFUSALS: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
}
_COMPLETION_REFUSALS: dict[str, tuple[object, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
}
_CHAT_REFUSALS: dict[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}


def _refuse_unsupported(value: dict[str, Any], refusals: dict[str, tuple[object, ...]]) -> None:
    for name in refusals.keys() & value.keys():
        if not any(type(value[name]) is type(harmless) and value[name] == harmless for harmless in refusals[name]):
            raise Unsupported(f"{name} is not supported", param=name)


def _parse(kind: type[_B], value: dict[str, Any]) -> _B:
    biases = value.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > limits.LOGIT_BIASES:  # before they are looked at
        raise OutOfRange(f"at most {limits.LOGIT_BIASES} tokens may have a bias", param="logit_bias")
    try:
        body = kind.model_validate(value)
    except pydantic.ValidationError as error:
        _raise(error)
    if body.n is not None:
        check_one(body.n, "n")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream", param="stream_options")
    return body


def _raise(error: pydantic.ValidationError) -> NoReturn:
    """The first mistake, by the name of its field: of several alternatives, the one that went furthest."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    same_field = [mistake for mistake in mistakes if mistake["loc"][0] == mistakes[0]["loc"][0]]
    furthest = max(same_field, key=lambda mistake: len(_path(mistake["loc"])))
    param = ".".join(_path(furthest["loc"]))
    message = "is required" if furthest["type"] == "missing" else furthest["msg"][0].lower() + furthest["msg"][1:]
    raise BadRequest(f"{param}: {message}", param=param) from None


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """Without the names of alternatives that pydantic puts between those of fields."""
    return [str(part) for part in loc if isinstance(part, int) or part in _FIELD_NAMES]


def _names(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields)


_FIELD_NAMES = frozenset().union(
    *(_names(kind) for kind in (CompletionBody, ChatBody, Message, TextPart, _OtherPart, StreamOptions))
)


def _without_input(error: ValueError) -> str:
    """The parser's reason with its place; it quotes nothing of the body."""
    return str(error).splitlines()[0]


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(limits.JSON_DEPTH):
        level = [
            child
            for holder in level
            for child in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise BadRequest(f"the body is nested deeper than {limits.JSON_DEPTH} levels")
