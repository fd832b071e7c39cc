"""A lane inside the measuring process: the parts that `python -m lanes` would assemble, with the same options, asked
over no socket. For figures that the wire does not carry.

Not here: which options, which prompts. Invariant: what is measured is the engine a served lane runs; only the cache
policy can be another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lanes import limits
from lanes.config import parse
from lanes.counters import Counters
from lanes.engine import Engine
from lanes.experts.adaptive import adaptive
from lanes.experts.policy import Policy
from lanes.outbox import Outbox, Token
from lanes.request import Request
from lanes.startup import Lane, assemble

LATE_TOKENS = 4  # by when a prompt has been counted


class AskFailed(RuntimeError):
    """A generation ended otherwise than by its length."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The tokens, when each was drawn (CLOCK_MONOTONIC), and what was counted once the first one was drawn.

    A GPU lane counts the experts of a prompt's last window while a window behind it runs, and tells its counters later
    still: `experts` is what was counted once the fourth token was drawn, none of the prompt's and all of the answer's
    but for a few windows. On an H200 the second token was too early: a prompt of 64 tokens was in it.
    """

    ids: list[int]
    stamps_ns: list[int]
    decode: Counters
    experts: Counters

    @property
    def steps_ns(self) -> list[int]:
        """From each token to the next."""
        return [b - a for a, b in pairwise(self.stamps_ns)]

    @property
    def tokens_per_s(self) -> float:
        """After the first token, which the prompt's last window gives."""
        return len(self.steps_ns) / max(1e-9, sum(self.steps_ns) / 1e9)


class _Outbox(Outbox):
    """Remembers what was counted before the first tokens; `put` is the engine's own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        super().__init__(loop, limits.OUTBOX_TOKENS)
        self._engine = engine
        self.before: list[Counters] = []

    def put(self, token: Token, stopped: Callable[[], bool], patience_s: float) -> bool:
        if len(self.before) < LATE_TOKENS:
            self.before.append(self._engine.status().counters)
        return super().put(token, stopped, patience_s)


class OwnLane:
    """One started lane; one question at a time."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._asked = 0

    def ask(self, prompt_ids: Sequence[int], tokens: int) -> Answered:
        """The greedy answer of so many tokens; raises AskFailed."""
        self._asked += 1
        return asyncio.run(self._ask(Request(f"ask-{self._asked}", tuple(prompt_ids), tokens)))

    async def _ask(self, request: Request) -> Answered:
        engine = self.lane.engine
        outbox = _Outbox(asyncio.get_running_loop(), engine)
        engine.submit(request, outbox)
        ids: list[int] = []
        stamps_ns: list[int] = []
        while True:
            for event in await outbox.take():
                if isinstance(event, Token):
                    ids.append(event.id)
                    stamps_ns.append(event.stamp_ns)
                elif event.reason != "length":
                    raise AskFailed(f"the answer ended by {event.reason}: {event.error_code} {event.error_message}")
                else:
                    now = engine.status().counters
                    first, late = (now.since(before) for before in (outbox.before[0], outbox.before[-1]))
                    return Answered(ids, stamps_ns, first, late)


@contextlib.contextmanager
def started(options: Sequence[str], policy: Policy = adaptive) -> Iterator[OwnLane]:
    """A lane with these options of `python -m lanes` until the block ends."""
    lane = assemble(parse(options, os.environ, frozenset(os.sched_getaffinity(0))), policy)
    with lane.resources:
        lane.engine.start()
        try:
            yield OwnLane(lane)
        finally:
            lane.engine.stop()
