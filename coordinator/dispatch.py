"""Moves requests from the queue to lanes and back: one task per running request.

      submit ─▶ queue ─▶ choose ─▶ _run: lane's stream ─▶ Generation
                  ▲                  │ busy, or lost before it began: back to the head
                  └──────────────────┘

Not here: text, wire formats of doors, starting and killing lanes. Invariants: a lane process never has more than its
capacity of our requests; its place is free only when it sent Finished, refused, or is lost; every submitted request
gets exactly one end, whatever dies; nothing is sent twice: only a request that has not begun goes to another lane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator import limits
from coordinator.affinity import Seat, SessionAffinity
from coordinator.errors import (
    Cancelled,
    Closing,
    CoordinatorError,
    InternalError,
    LaneBusy,
    LaneError,
    LaneFailed,
    LaneLost,
    LaneTimeout,
    NoLane,
    SlowReader,
)
from coordinator.generation import Ended, Generation
from coordinator.lane_client import LaneAccepted, LaneClient, LaneFinished, LaneTokens
from coordinator.lane_view import HOPEFUL_STATES, LaneView, Roster
from coordinator.queue import RequestQueue
from coordinator.request import Request
from coordinator.scheduler import LaneLoad, choose
from coordinator.stats import Timeline
from laneproto.v1 import lane_pb2

_log = structlog.get_logger("dispatch")


@dataclass(slots=True)
class _Run:
    generation: Generation
    seat: Seat
    task: asyncio.Task[None] | None = None
    gone: bool = False  # the roster says that this process is no more


class Dispatcher:
    """The queue and the running requests of one coordinator. Everything runs on one event loop."""

    def __init__(self, roster: Roster, *, queue_bound: int = limits.QUEUE_REQUESTS) -> None:
        self._roster = roster
        self.queue_bound = queue_bound
        self._queue: RequestQueue[Generation] = RequestQueue(queue_bound)
        self._affinity = SessionAffinity(limits.AFFINITY_SESSIONS)
        self._runs: dict[str, _Run] = {}  # by request id
        self._held: set[Seat] = set()  # processes that get no work for now
        self._pauses_s: dict[Seat, float] = {}  # how long a process that said "busy" was left alone last
        self._last_turn: dict[str, int] = {}
        self._turn = 0
        self._tries: dict[str, int] = {}  # request id -> lanes lost under it before it began
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe = roster.subscribe(self._on_roster)

    # --- for doors

    def submit(self, request: Request, timeline: Timeline | None = None) -> Generation:
        """Into the queue, or straight to a lane. Raises `Closing`, `NoLane` or `QueueFull`."""
        if self._closing:
            raise Closing("the server is shutting down")
        if not self._hopeful():
            raise NoLane("no lane is in service")
        generation = Generation(request, on_cancel=self._on_cancel, timeline=timeline)
        self._queue.push(request.id, generation)
        self._pump()
        return generation

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def position(self, generation: Generation) -> int | None:
        """How many requests are before this one; None when it does not wait."""
        return self._queue.position(generation.request.id)

    def running(self, lane: str) -> int:
        """Requests dispatched to the lane and not yet ended."""
        return sum(run.seat.lane == lane for run in self._runs.values())

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones end for `grace_s`, then cancels them. Leaves no task behind."""
        self._closing = True
        self._unsubscribe()
        for waiting in self._queue:
            self._drop(waiting, Closing("the server is shutting down"))
        running = [run.task for run in self._runs.values() if run.task]
        if running and grace_s > 0:
            await asyncio.wait(running, timeout=grace_s)
        for run in list(self._runs.values()):
            run.generation.cancel()
            run.generation.end(Closing("the server is shutting down"))
        running = [run.task for run in self._runs.values() if run.task]
        if running:
            await asyncio.wait(running, timeout=limits.DOOR_CLOSE_S)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # tasks leave the set in the loop's next turn

    # --- placement

    def _hopeful(self) -> bool:
        return any(view.state in HOPEFUL_STATES for view in self._roster.lanes())

    def _pump(self) -> None:
        """Gives waiting requests to free lanes, in order, as far as that goes."""
        if self._closing:
            return
        if not self._hopeful():
            for waiting in self._queue:
                self._drop(waiting, NoLane("no lane is in service"))
            return
        while (generation := self._queue.head()) is not None:
            seats = {
                view.name: Seat(view.name, view.incarnation)
                for view in self._roster.lanes()
                if view.state == "ready" and Seat(view.name, view.incarnation) not in self._held
            }
            loads = [
                LaneLoad(name, self._load(seat), limits.LANE_CAPACITY, self._last_turn.get(name, 0))
                for name, seat in seats.items()
            ]
            last = self._affinity.seat(generation.request.session)
            affine = last.lane if last and seats.get(last.lane) == last else None
            name = choose(loads, affine)
            if name is None:
                return
            self._dispatch(generation, seats[name])

    def _load(self, seat: Seat) -> int:
        return sum(run.seat == seat for run in self._runs.values())

    def _dispatch(self, generation: Generation, seat: Seat) -> None:
        request = generation.request
        self._queue.remove(request.id)
        self._turn += 1
        self._last_turn[seat.lane] = self._turn
        self._affinity.remember(request.session, seat)
        run = self._runs[request.id] = _Run(generation, seat)  # counted from here on, before the lane has answered
        _log.info("dispatched", request_id=request.id, lane=seat.lane, prompt_tokens=len(request.prompt_ids))
        run.task = self._spawn(self._run(run))

    # --- one running request

    async def _run(self, run: _Run) -> None:
        generation, seat = run.generation, run.seat
        carrier: asyncio.Task[None] | None = None
        try:
            client = self._roster.client(seat.lane)
            carrier = self._spawn(self._carry_cancel(run, client))
            await self._read_lane(run, client)
            self._pauses_s.pop(seat, None)
        except (LaneBusy, LaneLost, LaneTimeout, KeyError) as error:
            self._on_unavailable(run, error)
        except LaneError as error:
            self._finish(run, error)
        except asyncio.CancelledError:
            if not run.gone:
                self._finish(run, Closing("the server is shutting down"))
                raise
            self._on_unavailable(run, LaneLost(f"{seat.lane} went away"))
        except Exception:
            _log.exception("dispatch failed", request_id=generation.request.id, lane=seat.lane)
            self._finish(run, InternalError("internal error"))
        finally:
            if carrier is not None:
                carrier.cancel()
            self._runs.pop(generation.request.id, None)
            if generation.ended:
                self._tries.pop(generation.request.id, None)
            self._pump()

    async def _read_lane(self, run: _Run, client: LaneClient) -> None:
        generation = run.generation
        async with contextlib.aclosing(client.generate(generation.request.to_wire())) as events:
            async for event in events:
                match event:
                    case LaneAccepted():
                        generation.begin(run.seat.lane)
                    case LaneTokens(tokens):
                        if not generation.push(tokens):
                            self._finish(run, SlowReader("the client stopped reading"))
                            generation.cancel_wanted.set()
                    case LaneFinished(reason=lane_pb2.FINISH_REASON_ERROR):
                        reason = event.error_code or "no reason given"
                        self._finish(run, LaneFailed(f"{run.seat.lane} failed: {reason}"))
                    case LaneFinished():
                        self._finish(run, Ended(event.reason, event.usage, event.counters))

    def _on_unavailable(self, run: _Run, error: Exception) -> None:
        """The lane refused, or it or the connection went away."""
        generation, seat = run.generation, run.seat
        busy = isinstance(error, LaneBusy)
        if busy:
            pause_s = min(2 * self._pauses_s.get(seat, limits.BUSY_PAUSE_S / 2), limits.BUSY_PAUSE_MAX_S)
            self._pauses_s[seat] = pause_s
            self._held.add(seat)
            self._spawn(self._rest(seat, pause_s))
        elif not run.gone:
            self._held.add(seat)
            self._spawn(self._probe(run))
            self._suspect(seat.lane)
        if generation.ended:
            return
        if generation.cancel_wanted.is_set():
            self._finish(run, Cancelled("cancelled"))
        elif generation.lane is not None:
            sent = generation.tokens_seen
            self._finish(run, LaneLost(f"{seat.lane} went away after {sent} tokens of this answer"))
        elif not busy and self._tries.setdefault(generation.request.id, 1) >= limits.UNSTARTED_TRIES:
            self._finish(run, LaneLost(f"{seat.lane} went away; so did the lanes before it"))
        elif self._closing:
            self._finish(run, Closing("the server is shutting down"))
        else:
            if not busy:
                self._tries[generation.request.id] += 1
            _log.info("requeued", request_id=generation.request.id, lane=seat.lane, busy=busy)
            self._queue.push_front(generation.request.id, generation)

    def _finish(self, run: _Run, end: Ended | CoordinatorError) -> None:
        if not run.generation.end(end):
            return
        if isinstance(end, Ended):
            reason = lane_pb2.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower()
        else:
            reason = end.code
        _log.info(
            "ended",
            request_id=run.generation.request.id,
            lane=run.seat.lane,
            reason=reason,
            tokens=run.generation.tokens_seen,
        )

    # --- cancel

    def _on_cancel(self, generation: Generation) -> None:
        if self._queue.remove(generation.request.id):
            self._tries.pop(generation.request.id, None)
            generation.end(Cancelled("cancelled"))
            _log.info("left the queue", request_id=generation.request.id)
            self._pump()

    def _drop(self, generation: Generation, error: NoLane | Closing) -> None:
        self._queue.remove(generation.request.id)
        self._tries.pop(generation.request.id, None)
        generation.end(error)

    async def _carry_cancel(self, run: _Run, client: LaneClient) -> None:
        """Tells the lane; cancelled when the lane's stream has ended, which is the confirmation."""
        await run.generation.cancel_wanted.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.CANCEL_CONFIRM_S
        found = False
        while not found and loop.time() < deadline:
            try:
                found = await client.cancel(run.generation.request.id)
            except LaneError as error:
                _log.warning("cancel not delivered", lane=run.seat.lane, code=error.code)
            if not found:
                await asyncio.sleep(limits.CANCEL_RETRY_S)
        await asyncio.sleep(max(0.0, deadline - loop.time()))
        _log.warning("cancel not confirmed", request_id=run.generation.request.id, lane=run.seat.lane)
        # the client need not wait any longer; the lane's place stays taken until its stream ends or it is lost
        self._finish(run, LaneTimeout(f"{run.seat.lane} did not confirm the end in time"))
        self._suspect(run.seat.lane)

    # --- lanes that get no work for now

    async def _rest(self, seat: Seat, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._release(seat)

    async def _probe(self, run: _Run) -> None:
        """After a broken stream: no work for this process until the roster has seen its end, or it says it is free."""
        seat, request_id = run.seat, run.generation.request.id
        while True:
            await asyncio.sleep(limits.LOST_PROBE_S)
            view = self._view(seat.lane)
            if view is None or view.state != "ready" or view.incarnation != seat.incarnation:
                break
            try:
                client = self._roster.client(seat.lane)
                hello = await client.hello()
                if hello.incarnation != seat.incarnation or hello.status.active_request_id != request_id:
                    break
                await client.cancel(request_id)
            except (LaneError, KeyError):
                continue
        self._release(seat)

    def _release(self, seat: Seat) -> None:
        self._held.discard(seat)
        self._pump()

    def _view(self, lane: str) -> LaneView | None:
        return next((view for view in self._roster.lanes() if view.name == lane), None)

    def _suspect(self, lane: str) -> None:
        if self._view(lane) is not None:
            self._roster.report_suspect(lane)

    def _on_roster(self) -> None:
        living = {Seat(view.name, view.incarnation) for view in self._roster.lanes()}
        self._pauses_s = {seat: pause_s for seat, pause_s in self._pauses_s.items() if seat in living}
        for run in self._runs.values():
            if run.seat not in living:  # a lane that is only suspected keeps its process, and the stream may go on
                run.gone = True
                if run.task is not None:
                    run.task.cancel()
        self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
