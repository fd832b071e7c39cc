"""A dispatcher over real gRPC on simulated lanes, and what its tests read and expect.

Not a fake: it stands here because several test files use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from coordinator.dispatch import Dispatcher
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.request import Request
from coordinator.sampling import Sampling
from tests.fakes.lane import FakeLane, Script, token_at
from tests.fakes.roster import FakeRoster

_ids = iter(range(1_000_000))

SLOW = Script(token_delay_s=0.02)
ENDLESS = Script(token_delay_s=0.005)


def request(prompt: tuple[int, ...] = (5,), max_tokens: int = 3, session: str | None = None, **more: Any) -> Request:
    return Request(f"r{next(_ids)}", prompt, max_tokens, Sampling(0.0, 0, 1.0, 0), (2,), (), False, 0, session, **more)


@contextlib.asynccontextmanager
async def fleet(
    directory: Path, *scripts: Script, queue_bound: int = 256
) -> AsyncIterator[tuple[Dispatcher, FakeRoster, list[FakeLane]]]:
    lanes = [FakeLane(directory / f"{k}.sock", name=f"lane-{k}", script=script) for k, script in enumerate(scripts)]
    for lane in lanes:
        await lane.start()
    roster = FakeRoster(*lanes)
    dispatcher = Dispatcher(roster, queue_bound=queue_bound)
    try:
        yield dispatcher, roster, lanes
    finally:
        await dispatcher.close()
        assert not dispatcher._tasks
        assert not dispatcher._entries
        assert not dispatcher._runs
        await roster.close()
        for lane in lanes:
            await lane.stop()


async def read_all(generation: Generation, limit_s: float = 60.0) -> tuple[list[int], Ended]:
    """All token ids and the end; raises the error that ended it."""
    ids: list[int] = []
    async with asyncio.timeout(limit_s):
        while True:
            match await generation.read():
                case Begun():
                    assert not ids
                case Tokens(tokens):
                    ids += [token.id for token in tokens]
                case Ended() as end:
                    return ids, end


def made_up(prompt: tuple[int, ...], count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]
