"""The body of /v1/chat/completions: a conversation, tools, and how to answer.

Not here: fields about tokens and streams (bodies), what is answered (answers).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from coordinator import limits
from coordinator.apis.ask import ChatAsk, check_tools, parse_arguments, parse_bound, parse_effort
from coordinator.apis.json_body import List, Strict, check_length
from coordinator.apis.openai.bodies import Body, parse_common
from coordinator.errors import BadRequest, OutOfRange, Unsupported
from coordinator.text.conversation import ChatMessage, Conversation, Role, Thinking, Tool, ToolCall

_REFUSALS: dict[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}


class TextPart(Strict):
    """Content in parts: only text."""

    type: Literal["text"]
    text: str


class OtherPart(Strict):
    """Of any other type: refused by name."""

    type: str


def _part_kind(part: object) -> str:
    return "a text part" if isinstance(part, dict) and part.get("type") == "text" else "a part"


_Part = Annotated[
    Annotated[TextPart, pydantic.Tag("a text part")] | Annotated[OtherPart, pydantic.Tag("a part")],
    pydantic.Discriminator(_part_kind),
]


class CalledFunction(Strict):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str = ""


class MessageCall(Strict):
    """A call that the model made earlier."""

    id: str | None = None
    function: CalledFunction


class Message(Strict):
    """One turn. `developer` is the newer name of `system`, `reasoning` another one of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: List[MessageCall] | None = None
    function_call: Any = None

    def checked(self, place: int) -> ChatMessage:
        """The turn as text; `place` names it in errors."""
        where = f"messages.{place}"
        if self.function_call:
            raise Unsupported("function_call is not supported: use tool_calls", param=f"{where}.function_call")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest("only an assistant calls tools", param=f"{where}.tool_calls")
        if self.content is None and self.role != "assistant":
            raise BadRequest("content is required", param=f"{where}.content")
        role: Role = "system" if self.role == "developer" else self.role
        calls = tuple(
            ToolCall(
                call.function.name,
                parse_arguments(call.function.arguments, f"{where}.tool_calls.{number}.function.arguments"),
            )
            for number, call in enumerate(self.tool_calls or ())
        )
        return ChatMessage(role, self._text(where), self.reasoning_content or self.reasoning or "", calls)

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for number, part in enumerate(self.content):
            if not isinstance(part, TextPart):
                raise Unsupported("only text parts are supported", param=f"{where}.content.{number}.type")
            texts.append(part.text)
        return "".join(texts)


class DeclaredFunction(Strict):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Strict):
    """A tool: only functions."""

    type: Literal["function"]
    function: DeclaredFunction


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class ChatNamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class TemplateOptions(Strict):
    """What other servers pass to a template."""

    model_config = pydantic.ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None


class NamedSchema(Strict):
    """A JSON schema."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Strict):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: List[Message]
    tools: List[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None

    def ask(self, value: dict[str, Any]) -> ChatAsk:
        """What is asked; `value` is the body as it came, whose tools a model reads as they are."""
        if not self.messages:
            raise BadRequest("at least one message is required", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
        tools = () if self.tool_choice == "none" else self._tools(value)
        named = self.tool_choice.function.name if isinstance(self.tool_choice, ChatNamedTool) else None
        must = named is not None or self.tool_choice == "required"
        messages = [message.checked(place) for place, message in enumerate(self.messages)]
        max_tokens, max_tokens_param = self.most_tokens
        return ChatAsk(
            model=self.model,
            conversation=Conversation(messages, tools, self._thinking()),
            wanted=self.wanted(),
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            stops=self.stops,
            stop_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            stream=bool(self.stream),
            include_usage=self.include_usage,
            parallel=self.parallel_tool_calls is not False,
            bound=parse_bound(self._schema(), "response_format", tools, must, named, "tool_choice"),
            session_hint=self.prompt_cache_key,
        )

    def _tools(self, value: dict[str, Any]) -> tuple[Tool, ...]:
        return check_tools(
            [
                Tool(tool.function.name, value["tools"][place], tool.function.parameters or {})
                for place, tool in enumerate(self.tools or ())
            ]
        )

    def _schema(self) -> Any:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise BadRequest("a schema is required", param="response_format.json_schema.schema")
        return wanted.json_schema.schema_

    def _thinking(self) -> Thinking:
        options = self.chat_template_kwargs or TemplateOptions()
        word, param = self.reasoning_effort, "reasoning_effort"
        if word is None:
            word, param = options.reasoning_effort, "chat_template_kwargs.reasoning_effort"
        thinking = parse_effort(word, param)
        on = thinking.on if options.enable_thinking is None else options.enable_thinking
        return Thinking(on, thinking.effort, options.preserve_thinking is not False)


def parse_chat(value: dict[str, Any]) -> ChatAsk:
    """What the body of /v1/chat/completions asks."""
    messages = value.get("messages")
    if isinstance(messages, list) and len(messages) > limits.MESSAGES:  # before they are looked at
        raise OutOfRange(f"at most {limits.MESSAGES} messages", param="messages")
    check_length(value, "tools", limits.TOOLS)
    return parse_common(ChatBody, value, _REFUSALS).ask(value)
