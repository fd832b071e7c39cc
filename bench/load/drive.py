"""Agents that talk: closed loop, open loop, a victim with others beside it, a short question behind a long prompt.

Each agent walks through the scripts of a workload: it waits for the whole answer, puts it into the conversation, lets
its tool run (a pause), goes on. Not here: the request itself (door), figures (figures).
Invariant: what is asked depends on workload, scale and seed only, never on how fast answers come; only how many
scripts are reached does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bench.load.door import Reply
from bench.load.workloads import WORKLOADS, Scripts, Text, Turn, Workload, script

OPEN_LOOP_MOST = 10_000
OTHERS_FIRST_S = 0.5  # the others are at the server before the victim is


class Door(Protocol):
    """A server, behind whichever of its doors."""

    def client(self) -> AbstractAsyncContextManager[Any]:
        """Connections to it."""

    async def ask(
        self,
        client: Any,
        messages: Sequence[Mapping[str, Text]],
        *,
        key: str,
        session: str,
        max_tokens: int,
        timeout_s: float,
    ) -> Reply:
        """Sends the conversation and waits for the end of the answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every agent does."""

    server: Door
    workload: Workload
    scale: float
    seed: int
    nonce: str
    timeout_s: float
    scripts: Scripts = script


@dataclass(slots=True)
class Agent:
    """One agent: its number, and what it has got so far. One session for all its conversations, one for each branch."""

    work: Work
    client: Any  # the server's
    number: int
    label: str = ""
    replies: list[Reply] = field(default_factory=list)

    async def conversation(self, number: int, go_on: Callable[[], bool]) -> None:
        """One script from beginning to end, or until `go_on` says no."""
        work = self.work
        text = work.scripts(work.workload, work.scale, work.seed, self.number, number, work.nonce)
        name, session = f"{self.label}{self.number}/{number}", f"{self.work.nonce}{self.label}{self.number}"
        messages: list[dict[str, Text]] = [{"role": "system", "content": text.system}]
        if not await self._turns(name, session, messages, text.turns, go_on):
            return
        await asyncio.gather(
            *(
                self._turns(f"{name}/{k}", f"{session}/{k}", list(messages), turns, go_on)
                for k, turns in enumerate(text.branches)
            )
        )

    async def _turns(
        self,
        name: str,
        session: str,
        messages: list[dict[str, Text]],
        turns: tuple[tuple[Text, Turn], ...],
        go_on: Callable[[], bool],
    ) -> bool:
        """Asks turn after turn, `messages` growing; False when the conversation ended early."""
        for k, (words, turn) in enumerate(turns):
            if not go_on():
                return False
            messages.append({"role": "user", "content": words})
            reply = await self.work.server.ask(
                self.client, messages, key=f"{name}#{k}", session=session,
                max_tokens=turn.answer_tokens, timeout_s=self.work.timeout_s,
            )  # fmt: skip
            self.replies.append(reply)
            if reply.error is not None:
                await asyncio.sleep(min(1.0, self.work.timeout_s))  # a server that refuses at once is not hammered
                return False
            messages.append({"role": "assistant", "content": reply.text})
            if turn.pause_s and k + 1 < len(turns):
                await asyncio.sleep(turn.pause_s)
        return True

    async def until(self, end_s: float) -> None:
        """Conversation after conversation until that time; the request that runs then is waited for."""
        number = 0
        while time.monotonic() < end_s:
            await self.conversation(number, lambda: time.monotonic() < end_s)
            number += 1


async def closed_loop(work: Work, agents: int, seconds: float) -> list[Reply]:
    """`agents` agents for that long, each with one request at a time (a workload with branches: one per branch)."""
    async with work.server.client() as session:
        all_agents = [Agent(work, session, number) for number in range(agents)]
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(agent.until(end_s) for agent in all_agents))
    return _sorted(all_agents)


async def open_loop(work: Work, per_s: float, seconds: float) -> list[Reply]:
    """Conversations begin at random times (Poisson, from the seed), whether earlier ones have ended or not."""
    times = arrivals_s(per_s, seconds, work.seed)
    async with work.server.client() as session:
        all_agents = [Agent(work, session, number) for number in range(len(times))]
        begin_s = time.monotonic()

        async def one(agent: Agent, at_s: float) -> None:
            await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            await agent.conversation(0, lambda: True)

        await asyncio.gather(*(one(agent, at_s) for agent, at_s in zip(all_agents, times, strict=True)))
    return _sorted(all_agents)


def arrivals_s(per_s: float, seconds: float, seed: int) -> list[float]:
    """When conversations of an open loop begin."""
    source = random.Random(f"arrivals/{seed}")  # noqa: S311  a schedule, no secret
    times: list[float] = []
    at = source.expovariate(per_s)
    while at < seconds and len(times) < OPEN_LOOP_MOST:
        times.append(at)
        at += source.expovariate(per_s)
    return times


async def interference(work: Work, rounds: int, others: int) -> dict[int, list[Reply]]:
    """One conversation of a victim, alone and beside 1 … `others` busy agents, `rounds` times in rotated order.

    By number of others: the victim's replies, the rounds in their order.
    """
    seen: dict[int, list[Reply]] = {count: [] for count in range(others + 1)}
    for number in range(rounds):
        for step in range(others + 1):
            count = (number + step) % (others + 1)

            # a nonce of its own: what the victim asks was never read before, alone or not
            cold = replace(work, nonce=f"{work.nonce}.{number}.{count}")
            seen[count] += await _beside(cold, count, number)
    return seen


async def short_behind_long(work: Work, rounds: int) -> dict[str, list[Reply]]:
    """A short question alone, and the same while a long prompt (the workload) is being read; with the long ones."""
    question = replace(work, workload=WORKLOADS["question"])
    seen: dict[str, list[Reply]] = {"alone": [], "behind": [], "long": []}
    async with work.server.client() as session:
        for number in range(rounds):
            alone = Agent(question, session, 2 * number, "short-")
            await alone.conversation(0, lambda: True)
            long, behind = Agent(work, session, number, "long-"), Agent(question, session, 2 * number + 1, "short-")
            reading = asyncio.create_task(long.conversation(0, lambda: True))
            await asyncio.sleep(OTHERS_FIRST_S)
            await behind.conversation(0, lambda: True)
            await reading
            for name, agent in (("alone", alone), ("behind", behind), ("long", long)):
                seen[name] += agent.replies
    return seen


async def _beside(work: Work, others: int, number: int) -> list[Reply]:
    """The victim's conversation of that number while `others` agents are busy."""
    async with work.server.client() as session:
        stop = asyncio.Event()

        async def keep_on(agent: Agent) -> None:
            conversation = 0
            while not stop.is_set():
                await agent.conversation(conversation, lambda: not stop.is_set())
                conversation += 1

        tasks = [asyncio.create_task(keep_on(Agent(work, session, 1 + k, "other-"))) for k in range(others)]
        try:
            await asyncio.sleep(OTHERS_FIRST_S if others else 0.0)
            victim = Agent(work, session, 0, "victim-")
            await victim.conversation(number, lambda: True)
            return victim.replies
        finally:
            stop.set()
            for task in tasks:  # their requests are cancelled: the lanes are free for what comes next
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _sorted(agents: list[Agent]) -> list[Reply]:
    return sorted((reply for agent in agents for reply in agent.replies), key=lambda reply: reply.begin_s)
