"""A lane inside the measuring process: the parts that `python -m lanes` would assemble, with the same options, asked
over no socket. For figures that the wire does not carry.

Not here: which options, which prompts. Invariant: what is measured is the engine a served lane runs; only the cache
policy can be another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.synthetic.pack import Synthetic
from lanes import limits
from lanes.config import parse
from lanes.experts.adaptive import adaptive
from lanes.experts.policy import Policy
from lanes.outbox import End, Outbox
from lanes.request import Request
from lanes.startup import Lane, assemble


class AskFailed(RuntimeError):
    """A generation ended otherwise than by its length."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens and when each was drawn (CLOCK_MONOTONIC)."""

    ids: list[int]
    stamps_ns: list[int]
    end: End


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
        outbox = Outbox(asyncio.get_running_loop(), limits.OUTBOX_TOKENS)
        self.lane.engine.submit(request, outbox)
        answered = Answered([], [], End("", 0, 0, self.lane.engine.status().counters))
        while not answered.end.reason:
            for event in await outbox.take():
                if isinstance(event, End):
                    answered = Answered(answered.ids, answered.stamps_ns, event)
                else:
                    answered.ids.append(event.id)
                    answered.stamps_ns.append(event.stamp_ns)
        if answered.end.reason != "length":
            raise AskFailed(f"the answer ended by {answered.end.reason}: {answered.end.error_message}")
        return answered


@contextlib.contextmanager
def started(synthetic: Synthetic, folder: Path, options: Sequence[str], policy: Policy = adaptive) -> Iterator[OwnLane]:
    """A lane with these options of `python -m lanes` until the block ends; its sockets lie in `folder`."""
    owner = folder / "region.sock"
    argv = ["--owner", str(owner), "--pack", str(synthetic.folder), "--listen", f"unix:{folder}/lane.sock", *options]
    config = parse(argv, os.environ, frozenset(os.sched_getaffinity(0)))
    with synthetic.lend(owner):
        lane = assemble(config, policy)
    with lane.resources:
        lane.engine.start()
        try:
            yield OwnLane(lane)
        finally:
            lane.engine.stop()
