"""One request on one lane: reads the lane's stream into the generation, and carries a cancel to the lane.

Not here: which lane, and what a loss means (dispatch). Invariants: `read` returns only when the lane's stream has
ended, so the lane's place is free then and not before; a cancel is asked for until the lane knows the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from coordinator import limits
from coordinator.errors import LaneError, LaneFailed, LaneTimeout, SlowReader, Unsupported
from coordinator.fleet.lane_client import LaneAccepted, LaneClient, LaneFinished, LaneTokens
from coordinator.generation import Ended, Generation
from coordinator.policy.affinity import Seat
from laneproto.v1 import lane_pb2

# What a lane reports when it is itself at fault: the process ends, and another lane may do better.
LANE_FAULTS = frozenset(
    {"non_finite_logits", "engine_failed", "gpu_failed", "handshake_lost", "native_kernel_failed", "table_read_failed"}
)
# What it reports when the request is: the door's own compiler took the grammar, the lane's bounds are tighter.
BAD_GRAMMAR = "bad_grammar"

_log = structlog.get_logger("dispatch")


@dataclass(slots=True)
class LaneRun:
    """A request that was sent to a lane."""

    generation: Generation
    seat: Seat
    work_s: float  # expected
    began: float
    read_s: float = 0.0  # of the work, expected, until its first token
    host: LaneRun | None = None  # whose reading it interrupts
    alone_s: float = 0.0  # that it has the lane to itself then
    visits_s: float = 0.0  # that others have had it to themselves
    reads: bool = False  # accepted, no token yet, and the lane has not said otherwise
    task: asyncio.Task[None] | None = None
    gone: bool = False  # the roster says that this process is no more
    lane_at_fault: bool = False  # it said so itself

    def left_s(self, now: float) -> float:
        """Expected seconds until it ends: never nothing while it has not."""
        return max(self.work_s + self.visits_s - (now - self.began), 0.1 * self.work_s)

    async def read(self, client: LaneClient, on_accepted: Callable[[], None]) -> Ended | LaneFailed | Unsupported:
        """Reads to the end; raises the `LaneError` that the lane refused with or was lost by."""
        generation, name = self.generation, self.seat.lane
        end: Ended | LaneFailed | Unsupported | None = None
        wire = generation.request.to_wire(generation.emitted)
        if self.host is not None:
            wire.interrupts, wire.alone_ms = self.host.generation.request.id, max(1, round(1000 * self.alone_s))
        async with contextlib.aclosing(client.generate(wire)) as events:
            async for event in events:
                match event:
                    case LaneAccepted():
                        generation.begin(name)
                        self.reads = True
                        on_accepted()
                    case LaneTokens(tokens):
                        self.reads = False
                        if not generation.push(tokens):
                            generation.end(SlowReader("the client stopped reading"))
                            generation.cancel_wanted.set()
                    case LaneFinished(reason=lane_pb2.FINISH_REASON_ERROR, error_code=code) if code == BAD_GRAMMAR:
                        end = Unsupported("the schema is beyond what an answer can be kept to")
                    case LaneFinished(reason=lane_pb2.FINISH_REASON_ERROR):
                        self.lane_at_fault = event.error_code in LANE_FAULTS
                        end = LaneFailed(f"{name} failed: {event.error_code or 'no reason given'}")
                    case LaneFinished():
                        end = Ended(event.reason, event.usage, event.counters)
        assert end is not None, "the client raises when there is no last event"
        return end

    async def carry_cancel(self, client: LaneClient, suspect: Callable[[str], None]) -> None:
        """Tells the lane; to be cancelled when the lane's stream has ended, which is the confirmation."""
        generation, name = self.generation, self.seat.lane
        await generation.cancel_wanted.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.CANCEL_CONFIRM_S
        found = False
        while not found and loop.time() < deadline:
            try:
                found = await client.cancel(generation.request.id)
            except LaneError as error:
                _log.warning("cancel not delivered", lane=name, code=error.code)
            if not found:
                await asyncio.sleep(limits.CANCEL_RETRY_S)
        await asyncio.sleep(max(0.0, deadline - loop.time()))
        _log.warning("cancel not confirmed", request_id=generation.request.id, lane=name)
        # the client need not wait any longer; the lane's place stays taken until its stream ends or it is lost
        generation.end(LaneTimeout(f"{name} did not confirm the end in time"))
        suspect(name)
