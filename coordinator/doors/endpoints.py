"""The routes that answer: of each, how its body is read and in which format the answer is sent.

Not here: HTTP (http), what bodies and answers look like (the APIs). Invariant: errors have the shape of their API.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from coordinator import limits
from coordinator.apis.anthropic.answers import MessageWriter
from coordinator.apis.anthropic.bodies import MessagesBody, parse_messages
from coordinator.apis.ask import ChatAsk
from coordinator.apis.openai.answers import CompletionWriter
from coordinator.apis.openai.bodies import CompletionBody, parse_completion
from coordinator.apis.openai.chat import ChatBody, parse_chat
from coordinator.apis.openai.responses import ResponsesBody, parse_responses
from coordinator.apis.openai.responses_answers import ResponseWriter
from coordinator.apis.writer import Writer
from coordinator.chat import TurnReader, begin_turn, read_text
from coordinator.doors.refusals import MESSAGES
from coordinator.request import Draft
from coordinator.serving import Caller, Serving


@dataclass(frozen=True, slots=True)
class Answering:
    """An answer under way, and how it is to be sent."""

    turn: TurnReader
    writer: Writer
    stream: bool


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: `body` is its JSON, `parse` may run in a thread, `begin` submits."""

    summary: str
    body: type[BaseModel]
    parse: Callable[[dict[str, Any]], Any]
    begin: Callable[[Serving, Any, Caller], Awaitable[Answering]]


async def _complete(serving: Serving, body: CompletionBody, caller: Caller) -> Answering:
    model = serving.check_model(body.model)
    prompt = body.one_prompt()
    if isinstance(prompt, str):
        prompt = await serving.text.encode_text(prompt, context_tokens=model.context_tokens)
    max_tokens, max_tokens_param = body.most_tokens
    draft = Draft(
        prompt_ids=prompt,
        prompt_param="prompt",
        default_seed=serving.new_seed(),
        defaults=serving.generation.defaults,
        wanted=body.wanted(),
        default_max_tokens=limits.DEFAULT_MAX_TOKENS_COMPLETIONS,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stops=body.stops,
        stop_ids=tuple(body.stop_token_ids or ()),
        stop_ids_param="stop_token_ids",
        end_ids=serving.generation.end_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        top_logprobs_param="logprobs",
        session=caller.session,
        parent_session=caller.parent_session,
        tenant=caller.tenant,
        priority=caller.priority,
        timeout_s=caller.timeout_s,
    )
    answer = await serving.submit(draft, caller, "http")
    turn = read_text(answer)
    writer = _completion_writer(serving, turn, model.name, chat=False, include_usage=body.include_usage)
    return Answering(turn, writer, bool(body.stream))


async def _chat(serving: Serving, ask: ChatAsk, caller: Caller) -> Answering:
    turn = await begin_turn(serving, ask, caller)
    name = serving.model().name
    writer = _completion_writer(serving, turn, name, chat=True, include_usage=ask.include_usage)
    return Answering(turn, writer, ask.stream)


def _completion_writer(
    serving: Serving, turn: TurnReader, model: str, *, chat: bool, include_usage: bool
) -> CompletionWriter:
    asked = turn.request
    return CompletionWriter(
        chat=chat,
        request_id=asked.id,
        model=model,
        created=int(time.time()),
        seed=asked.sampling.seed,
        text=serving.text,
        logprobs=asked.logprobs,
        include_usage=include_usage,
    )


async def _respond(serving: Serving, asked: tuple[ResponsesBody, ChatAsk], caller: Caller) -> Answering:
    body, ask = asked
    turn = await begin_turn(serving, ask, caller)
    echoed: dict[str, Any] = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": ask.parallel,
        "temperature": turn.request.sampling.temperature,
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
        "tools": [],
        "top_p": turn.request.sampling.top_p,
        "store": False,
    }
    writer = ResponseWriter(
        turn.request.id,
        serving.model().name,
        int(time.time()),
        echoed,
        free_form=body.free_form,
        packs_reasoning=body.packs_reasoning,
    )
    return Answering(turn, writer, ask.stream)


async def _message(serving: Serving, ask: ChatAsk, caller: Caller) -> Answering:
    turn = await begin_turn(serving, ask, caller)
    writer = MessageWriter(turn.request.id, serving.model().name, len(turn.request.prompt_ids))
    return Answering(turn, writer, ask.stream)


ENDPOINTS = {
    "/v1/completions": Endpoint("Text goes on from a prompt.", CompletionBody, parse_completion, _complete),
    "/v1/chat/completions": Endpoint("The next turn of a conversation.", ChatBody, parse_chat, _chat),
    "/v1/responses": Endpoint("The same in OpenAI's newer API.", ResponsesBody, parse_responses, _respond),
    MESSAGES: Endpoint("The same in Anthropic's API.", MessagesBody, parse_messages, _message),
}
