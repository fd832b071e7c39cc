"""One chat request to an OpenAI-compatible server, streamed, with the time of every piece as it arrived here.

The same ruler for this server and for others. Not here: how many ask, and when (drive), token ids (token_door).
Invariant: `ask` always returns a `Reply`; a refusal, a broken stream and a timeout are its `error`, never an exception.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.aligned import Stamp, Stream
from bench.load.workloads import Text

NO_LANE = "server"  # of a server that does not say which of its engines answered
LINE_LIMIT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request brought; times in seconds of this process's monotonic clock."""

    key: str  # which request of which script: the same in every run of the same work
    lane: str
    begin_s: float
    end_s: float
    pieces: tuple[tuple[float, int], ...]  # (arrival, tokens in it)
    prompt_tokens: int
    cached_tokens: int
    counters: Mapping[str, int]
    text: Text  # of the answer, as it goes into the next turn
    error: str | None  # a stable code, or what went wrong

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return sum(tokens for _, tokens in self.pieces)

    @property
    def ttft_s(self) -> float | None:
        """To the first token; None without one."""
        return self.pieces[0][0] - self.begin_s if self.pieces else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one token and the next; tokens that came together share the gap before them."""
        gaps: list[float] = []
        for (before, _), (at, tokens) in zip(self.pieces, self.pieces[1:], strict=False):
            gaps += [(at - before) / tokens] * tokens
        return tuple(gaps)

    @property
    def stream(self) -> Stream:
        """The request as the aggregate sees it."""
        return Stream(self.begin_s, self.end_s, tuple(Stamp(at, tokens) for at, tokens in self.pieces))


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask: the base URL (…/v1), the model's name there, a key."""

    url: str
    model: str
    key: str | None = None
    fixed_length: bool = True  # send `ignore_eos`, which servers that do not know it ignore

    def headers(self, session: str) -> dict[str, str]:
        """Of every request."""
        return {"x-session-id": session, **({"authorization": f"Bearer {self.key}"} if self.key else {})}

    def client(self) -> aiohttp.ClientSession:
        """Connections to it, without a bound on their number: who waits is to wait at the server."""
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=LINE_LIMIT_BYTES)

    async def ask(
        self,
        client: aiohttp.ClientSession,
        messages: Sequence[Mapping[str, Text]],
        *,
        key: str,
        session: str,
        max_tokens: int,
        timeout_s: float,
    ) -> Reply:
        """Sends the conversation and waits for the end of the answer."""
        body: dict[str, Any] = {
            "model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0, "seed": 1,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.fixed_length:
            body["ignore_eos"] = True
        read = _Reader()
        begin_s = time.monotonic()
        error: str | None = None
        try:
            async with client.post(
                self.url + "/chat/completions",
                json=body,
                headers=self.headers(session),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                if response.status != 200:
                    error = _refusal(response.status, await response.content.read(LINE_LIMIT_BYTES))
                else:
                    async for line in response.content:
                        read.line(line, time.monotonic())
                    error = read.error or (None if read.ended else "stream_cut")
                lane = response.headers.get("x-expressway-lane", "")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as broken:
            lane, error = "", f"{type(broken).__name__}"
        return Reply(
            key=key,
            lane=read.lane or lane or NO_LANE,
            begin_s=begin_s,
            end_s=time.monotonic(),
            pieces=read.pieces(),
            prompt_tokens=int(read.usage.get("prompt_tokens") or 0),
            cached_tokens=int((read.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            counters=read.counters,
            text="".join(read.texts),
            error=error,
        )


class _Reader:
    """Takes the lines of a stream of server-sent events."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.counters: dict[str, int] = {}
        self.lane = ""
        self.error: str | None = None
        self.ended = False

    def line(self, line: bytes, now_s: float) -> None:
        """One line; whatever is no event of ours is passed over."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return
        event = json.loads(data)
        if isinstance(event.get("error"), dict):
            self.error = str(event["error"].get("code") or event["error"].get("type") or "error")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = "".join(str(delta.get(name) or "") for name in ("reasoning_content", "content"))
            if text or delta.get("tool_calls"):
                self.arrivals_s.append(now_s)
                self.texts.append(str(delta.get("content") or ""))
            self.ended = self.ended or choice.get("finish_reason") is not None
        self.usage = event.get("usage") or self.usage
        if isinstance(ours := event.get("expressway"), dict):
            self.lane = str(ours.get("lane") or self.lane)
            self.counters = {k: v for k, v in (ours.get("counters") or {}).items() if isinstance(v, int)}

    def pieces(self) -> tuple[tuple[float, int], ...]:
        """Arrivals with their tokens: what the server counted, spread evenly over what arrived.

        A piece of text can be several tokens, and a token no text yet (a part of a character).
        """
        count = len(self.arrivals_s)
        total = int(self.usage.get("completion_tokens") or count)
        shares = [(k + 1) * total // count - k * total // count for k in range(count)]
        return tuple((at, n) for at, n in zip(self.arrivals_s, shares, strict=True) if n)


def _refusal(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{status}"


async def served_model(client: aiohttp.ClientSession, server: Server) -> str:
    """The name of the first model it serves. Raises OSError when it does not answer as such a server."""
    try:
        async with client.get(server.url + "/models", headers=server.headers("")) as response:
            if response.status != 200:
                wanted = "; it wants a key (--key-variable)" if response.status == 401 else ""
                raise OSError(f"{server.url}/models: {_refusal(response.status, await response.read())}{wanted}")
            listed = json.loads(await response.read())
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, IndexError) as error:
        hint = (
            "; it may speak TLS only (--url https://HOST:PORT/v1)"
            if isinstance(error, aiohttp.ServerDisconnectedError)
            else ""
        )
        raise OSError(f"{server.url}/models: {type(error).__name__}: {error}{hint}") from None
