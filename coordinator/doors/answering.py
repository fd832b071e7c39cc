"""Sends one turn to one HTTP client, whole or streamed, in the format of its API.

Not here: routes and bodies (http), formats (the APIs). Invariants: an answer whose client is gone is cancelled; a
stream that has begun has exactly one end; something is sent at least every `limits.KEEPALIVE_COMMENT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiohttp import web

from coordinator import limits
from coordinator.apis.writer import Event, Writer, dump
from coordinator.chat import Said, Turn, TurnEnd, TurnReader
from coordinator.doors.sse import EventStream
from coordinator.errors import CoordinatorError
from coordinator.generation import Begun

LANE_HEADER = "x-expressway-lane"
QUEUED_KEY: web.RequestKey[bool] = web.RequestKey("queued", bool)  # set once an answer is on its way


async def respond(
    turn: TurnReader, writer: Writer, request: web.Request, headers: dict[str, str], *, stream: bool
) -> web.StreamResponse:
    """The whole answer. Raises what went wrong before anything was sent."""
    request[QUEUED_KEY] = True
    try:
        if stream:
            return await _streamed(turn, writer, EventStream(request, headers))
        return await _whole(turn, writer)
    finally:
        turn.answer.cancel()  # nothing to do after the end; else the client is gone


async def _whole(reader: TurnReader, writer: Writer) -> web.Response:
    turn = Turn()
    while True:
        event = await reader.read()
        match event:
            case Said():
                turn.add(event)
            case TurnEnd(final):
                body = dump(writer.whole(turn, event)).encode()
                return web.Response(body=body, content_type="application/json", headers={LANE_HEADER: final.lane})


async def _streamed(reader: TurnReader, writer: Writer, out: EventStream) -> web.StreamResponse:
    loop = asyncio.get_running_loop()
    sent_at = loop.time()
    try:
        while True:
            try:
                async with asyncio.timeout_at(sent_at + limits.KEEPALIVE_COMMENT_S):
                    event = await reader.read()
            except TimeoutError:
                await out.ping(writer.ping() if reader.answer.generation.lane else None)
                sent_at = loop.time()
                continue
            match event:
                case Begun(lane):
                    await out.begin(**{LANE_HEADER: lane})
                    sent = await _send(out, writer.begin())
                case Said():
                    sent = await _send(out, writer.said(event))
                case TurnEnd():
                    await _send(out, writer.end(event))
                    return await out.begin()
            sent_at = loop.time() if sent else sent_at
    except CoordinatorError as error:
        if not out.begun:
            raise
        await _send(out, writer.failed(error))
        return await out.begin()


async def _send(out: EventStream, events: Iterable[Event]) -> bool:
    sent = False
    for event in events:
        await out.send(event)
        sent = True
    return sent
