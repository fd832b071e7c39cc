"""The body of /v1/messages (and of its count_tokens): a conversation in content blocks, tools, and how to answer.

Blocks that are more than text are refused by name where they would change the answer; tools that a server would have to
run are left out, so the model never hears of them. A system block that only names the sender's build is left out too:
it changes from call to call, and a prompt that begins differently is read anew.

Not here: what is answered (answers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from coordinator import limits
from coordinator.apis.ask import ChatAsk, check_tools, parse_bound, parse_effort
from coordinator.apis.json_body import List, Strict, check_length, parse_body
from coordinator.errors import BadRequest, OutOfRange, Unsupported
from coordinator.sampling import Wanted
from coordinator.text.conversation import ChatMessage, Conversation, Thinking, Tool, ToolCall

BUILD_LINE = "x-anthropic-billing-header:"
_PARTS = "\n"  # between the texts of one turn


class Block(Strict):
    """A content block of any type; which fields it has depends on that."""

    type: str
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | List[Block] | None = None


class Turn(Strict):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | List[Block]


class MessagesTool(Strict):
    """A tool; only those without a type, or of type custom, are the client's own."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Strict):
    """Whether to think. How much is `output_config.effort`; a budget of tokens is not kept."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Strict):
    """What the text is to be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """How to answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(Strict):
    """POST /v1/messages."""

    model: str | None = None
    messages: List[Turn]
    system: str | List[Block] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: List[str] | None = None
    stream: bool | None = None
    tools: List[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def ask(self) -> ChatAsk:
        """What is asked."""
        if not self.messages:
            raise BadRequest("at least one message is required", param="messages")
        if self.messages[-1].role == "assistant":
            raise Unsupported("an answer cannot be begun by the client", param=f"messages.{len(self.messages) - 1}")
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = () if choice.type == "none" else self._tools()
        wanted = self.output_config.format if self.output_config else None
        schema = None if wanted is None else wanted.schema_
        must, named = choice.type in ("any", "tool"), (choice.name or "") if choice.type == "tool" else None
        return ChatAsk(
            model=self.model,
            conversation=Conversation(self._turns(), tools, self._thinking()),
            wanted=Wanted(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences or ()),
            stream=bool(self.stream),
            bound=parse_bound(schema, "output_config.format.schema", tools, must, named, "tool_choice"),
            parallel=choice.disable_parallel_tool_use is not True,
        )

    def _turns(self) -> list[ChatMessage]:
        turns: list[ChatMessage] = []
        if self.system:
            blocks = [Block(type="text", text=self.system)] if isinstance(self.system, str) else self.system
            texts = [_text(block, f"system.{number}") for number, block in enumerate(blocks)]
            kept = [text for text in texts if not text.startswith(BUILD_LINE)]
            turns.append(ChatMessage("system", _PARTS.join(kept)))
        for place, turn in enumerate(self.messages):
            where = f"messages.{place}.content"
            if isinstance(turn.content, str):
                turns.append(ChatMessage(turn.role, turn.content))
            elif turn.role == "assistant":
                turns.append(_assistant(turn.content, where))
            else:
                turns += _user(turn, turn.content, where)
        return turns

    def _tools(self) -> tuple[Tool, ...]:
        own = [tool for tool in self.tools or () if tool.type in (None, "custom")]
        return check_tools([Tool.of(tool.name, tool.description, tool.input_schema) for tool in own])

    def _thinking(self) -> Thinking:
        word = self.output_config.effort if self.output_config else None
        thinking = parse_effort(word, "output_config.effort")
        wanted = self.thinking is not None and self.thinking.type != "disabled"
        return Thinking(on=wanted and thinking.on, effort=thinking.effort)


def parse_messages(value: dict[str, Any]) -> ChatAsk:
    """What the body of /v1/messages asks."""
    ask = parse_counted(value)
    if ask.max_tokens is None:
        raise BadRequest("max_tokens: is required", param="max_tokens")
    return ask


def parse_counted(value: dict[str, Any]) -> ChatAsk:
    """The same for /v1/messages/count_tokens, where nothing is answered."""
    messages = value.get("messages")
    if isinstance(messages, list) and len(messages) > limits.MESSAGES:  # before they are looked at
        raise OutOfRange(f"at most {limits.MESSAGES} messages", param="messages")
    check_length(value, "tools", limits.TOOLS)
    return parse_body(MessagesBody, value).ask()


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise Unsupported("only text blocks are supported here", param=f"{where}.type")
    if block.text is None:
        raise BadRequest("text is required", param=f"{where}.text")
    return block.text


def _assistant(blocks: Sequence[Block], where: str) -> ChatMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        match block.type:
            case "thinking":
                reasoning.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if not block.name:
                    raise BadRequest("name is required", param=f"{where}.{number}.name")
                calls.append(ToolCall(block.name, block.input or {}))
            case _:
                texts.append(_text(block, f"{where}.{number}"))
    return ChatMessage("assistant", _PARTS.join(texts), _PARTS.join(reasoning), tuple(calls))


def _user(turn: Turn, blocks: Sequence[Block], where: str) -> list[ChatMessage]:
    """Results of tools are turns of their own, in the order that they have among the texts."""
    turns: list[ChatMessage] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(block, f"{where}.{number}"))
            continue
        if texts:
            turns.append(ChatMessage(turn.role, _PARTS.join(texts)))
            texts = []
        turns.append(ChatMessage("tool", _result(block, f"{where}.{number}.content")))
    if texts:
        turns.append(ChatMessage(turn.role, _PARTS.join(texts)))
    return turns


def _result(block: Block, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return _PARTS.join(_text(part, f"{where}.{number}") for number, part in enumerate(block.content))
