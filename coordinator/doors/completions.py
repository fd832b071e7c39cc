"""The two completion endpoints: from a typed body to a submitted answer, and that to the client, whole or streamed.

Not here: routes and bodies (http), shapes (openai_answers). Invariants: an answer whose client is gone is cancelled; a
stream that has begun ends with [DONE] or with one error event, never both and never neither.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from coordinator import limits
from coordinator.answer import Answer, AnswerToken, Final, Piece
from coordinator.doors.sse import EventStream, dump
from coordinator.errors import CoordinatorError
from coordinator.generation import Begun
from coordinator.openai import ChatBody, CompletionBody
from coordinator.openai_answers import LogprobFeed, Shape, error_body
from coordinator.request import Draft
from coordinator.serving import Serving

LANE_HEADER = "x-expressway-lane"
QUEUED_KEY: web.RequestKey[bool] = web.RequestKey("queued", bool)  # set once an answer is on its way


class Completions:
    """Both endpoints on one `Serving`."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def complete(
        self,
        body: CompletionBody,
        request: web.Request,
        request_id: str,
        session: str | None,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """POST /v1/completions."""
        model = self._serving.check_model(body.model)
        prompt = body.one_prompt()
        if isinstance(prompt, str):
            prompt = await self._serving.text.encode_text(prompt, context_tokens=model.context_tokens)
        max_tokens, max_tokens_param = body.most_tokens
        draft = Draft(
            prompt_ids=prompt,
            prompt_param="prompt",
            default_seed=self._serving.new_seed(),
            defaults=self._serving.generation.defaults,
            wanted=body.wanted(),
            default_max_tokens=limits.DEFAULT_MAX_TOKENS_COMPLETIONS,
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            stops=body.stops,
            stop_ids=tuple(body.stop_token_ids or ()),
            stop_ids_param="stop_token_ids",
            end_ids=self._serving.generation.end_ids,
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            top_logprobs_param="logprobs",
            session=session,
        )
        answer = self._serving.submit(draft, request_id=request_id, door="http")
        request[QUEUED_KEY] = True
        shape = self._shape(False, answer, model.name)
        return await self._respond(answer, shape, body.stream, body.include_usage, request, headers)

    async def chat(
        self, body: ChatBody, request: web.Request, request_id: str, session: str | None, headers: dict[str, str]
    ) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        model = self._serving.check_model(body.model)
        text = self._serving.text
        prompt = await text.encode_chat(body.conversation(), context_tokens=model.context_tokens)
        max_tokens, max_tokens_param = body.most_tokens
        draft = Draft(
            prompt_ids=prompt,
            prompt_param="messages",
            default_seed=self._serving.new_seed(),
            defaults=self._serving.generation.defaults,
            wanted=body.wanted(),
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            stops=body.stops,
            stop_ids=tuple(body.stop_token_ids or ()),
            stop_ids_param="stop_token_ids",
            end_ids=(*text.chat_end_ids(), *self._serving.generation.end_ids),
            ignore_eos=bool(body.ignore_eos),
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            session=session,
        )
        answer = self._serving.submit(draft, request_id=request_id, door="http")
        request[QUEUED_KEY] = True
        shape = self._shape(True, answer, model.name)
        return await self._respond(answer, shape, body.stream, body.include_usage, request, headers)

    def _shape(self, chat: bool, answer: Answer, model: str) -> Shape:
        sent = answer.request
        return Shape(chat, sent.id, model, int(time.time()), sent.sampling.seed, self._serving.text)

    async def _respond(
        self,
        answer: Answer,
        shape: Shape,
        stream: bool | None,
        include_usage: bool,
        request: web.Request,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        try:
            if stream:
                return await _streamed(answer, shape, include_usage, EventStream(request, headers))
            return await _whole(answer, shape)
        finally:
            answer.cancel()  # nothing to do after the end; else the client is gone


async def _whole(answer: Answer, shape: Shape) -> web.Response:
    texts: list[str] = []
    feed = LogprobFeed()
    tokens: list[AnswerToken] = []
    while True:
        event = await answer.read()
        match event:
            case Piece():
                texts.append(event.text)
                tokens += feed.feed(event)
            case Final():
                tokens += feed.flush(event)
                body = shape.whole("".join(texts), tokens if answer.request.logprobs else None, event)
                return web.Response(
                    body=dump(body).encode(), content_type="application/json", headers={LANE_HEADER: event.lane}
                )


async def _streamed(answer: Answer, shape: Shape, include_usage: bool, out: EventStream) -> web.StreamResponse:
    feed = LogprobFeed()
    logprobs = answer.request.logprobs
    opened = False
    try:
        while True:
            try:
                async with asyncio.timeout(limits.KEEPALIVE_COMMENT_S):
                    event = await answer.read()
            except TimeoutError:
                await out.comment()
                continue
            match event:
                case Begun(lane):
                    await out.begin(**{LANE_HEADER: lane})
                case Piece():
                    if not opened:
                        opened = True
                        await _open(shape, out)
                    tokens = feed.feed(event)
                    if event.text or (logprobs and tokens):
                        await out.data(shape.piece(event.text, tokens if logprobs else None))
                case Final():
                    if not opened:
                        await _open(shape, out)
                    left = feed.flush(event)
                    await out.data(shape.closing(left if logprobs else None, event))
                    if include_usage:
                        await out.data(shape.usage(event))
                    await out.done()
                    return await out.begin()
    except CoordinatorError as error:
        if not out.begun:
            raise
        await out.data(error_body(error))
        return await out.begin()


async def _open(shape: Shape, out: EventStream) -> None:
    opening = shape.opening()
    if opening is not None:
        await out.data(opening)
