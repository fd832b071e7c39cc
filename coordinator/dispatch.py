"""Moves requests from the queue to lanes and back: one task per running request.

      submit ─▶ admission ─▶ queue ─▶ placement, or visit ─▶ LaneRun: lane's stream ─▶ Generation
                               ▲                                │ busy, or lost: back to the head, with what was sent
                               └────────────────────────────────┘

Not here: text, wire formats of doors, starting and killing lanes; the decisions (policy). Invariants: a lane process
never has more than its capacity of our requests, and one that visits (visits); a place is free only when the lane sent
Finished, refused, or is lost;
every submitted request gets exactly one end, whatever dies; a lane that takes a request over is told every token that
was sent, so a client sees no gap and no token twice.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence

import structlog

from coordinator import limits
from coordinator.entry import Entry
from coordinator.errors import (
    Cancelled,
    Closing,
    CoordinatorError,
    DeadlineExceeded,
    InternalError,
    LaneBusy,
    LaneError,
    LaneFailed,
    LaneLost,
    LaneRejected,
    NoLane,
    QueueFull,
)
from coordinator.fleet.lane_view import Roster, counted, is_hopeful
from coordinator.generation import Ended, Generation
from coordinator.lane_run import LaneRun
from coordinator.policy.admission import Admission
from coordinator.policy.affinity import Seat
from coordinator.policy.fair_queue import FairQueue, Ticket
from coordinator.policy.families import Families
from coordinator.policy.kept import Conversations, Kept
from coordinator.policy.placer import Placed, Placer, first_to_begin
from coordinator.policy.shares import Shares
from coordinator.request import Request
from coordinator.resting import RestingSeats
from coordinator.tasks import Tasks
from coordinator.telemetry.stats import Timeline
from coordinator.tenants import Tenant
from coordinator.visits import Found, Visits
from laneproto.chain import chain
from laneproto.v1 import lane_pb2

_log = structlog.get_logger("dispatch")


class Dispatcher:
    """The queue and the running requests of one coordinator. Everything runs on one event loop."""

    def __init__(
        self, roster: Roster, *, queue_bound: int = limits.QUEUE_REQUESTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._roster, self._clock = roster, clock
        self._shares = Shares()
        self._queue: FairQueue[Entry] = FairQueue(queue_bound, self._shares)
        self._admission = Admission()
        self._families = Families(limits.AFFINITY_SESSIONS)
        self._placer = Placer()
        self._kept = Conversations()
        self._entries: dict[str, Entry] = {}  # by request id
        self._runs: dict[str, LaneRun] = {}
        self._visits = Visits(self._runs, self._placer)
        self._closing = False
        self._tasks = Tasks()
        self._resting = RestingSeats(roster, self._tasks, self._pump)
        self._wake: asyncio.TimerHandle | None = None
        self._unsubscribe = roster.subscribe(self._on_roster)
        roster.hear_prefixes(lambda news: self._placer.tell(news.seat, news.added, news.removed, anew=news.anew))

    # --- for doors

    def check_open(self, tenant: Tenant) -> None:
        """Raises the `Refused` of a request however small: closing, no lane, no place. Before anything else is done for
        it: under overload, what it costs to refuse one is what all others wait for."""
        if self._closing:
            raise Closing("the server is shutting down")
        if not self._hopeful():
            raise NoLane("no lane is in service")
        self._check_room(tenant, 0)

    def submit(
        self, request: Request, timeline: Timeline | None = None, chains: Sequence[bytes] | None = None
    ) -> Generation:
        """Into the queue, or straight to a lane; `chains` of its prompt, where the caller has them.

        Raises a `Refused`: closing, no lane, no place, over a quota.
        """
        self.check_open(request.tenant)
        now, tenant, prompt_tokens = self._clock(), request.tenant, len(request.prompt_ids)
        size_bytes = prompt_tokens * limits.TOKEN_BYTES
        self._check_room(tenant, size_bytes, request.timeout_s)
        self._admission.admit(tenant, prompt_tokens, now)
        flow = self._families.of(tenant.name, request.session, request.parent_session)
        tokens = prompt_tokens + self._placer.lengths.expected(request.max_tokens)
        generation = Generation(request, on_cancel=self._on_cancel, on_end=self._on_end, timeline=timeline)
        expiry = asyncio.get_running_loop().call_later(request.timeout_s, self._expire, request.id)
        ticket = Ticket(request.id, tenant, flow, request.priority, tokens, size_bytes, now)
        chains = chain(request.prompt_ids, tenant.salt) if chains is None else chains
        entry = self._entries[request.id] = Entry(generation, ticket, expiry, chains)
        self._shares.enter(tenant.name, flow)
        self._queue.push(entry, ticket)
        self._pump()
        return generation

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def conversations(self) -> list[Kept]:
        """Of the sessions that asked last: what of their prompts is kept where."""
        return self._kept.kept(self._placer.prefixes)

    @property
    def queue_bound(self) -> int:
        """How many may wait."""
        return self._queue.bound

    def position(self, generation: Generation) -> int | None:
        """How many requests are before this one; None when it does not wait."""
        found = self._queue.position(generation.request.id, self._clock())
        return found and found[0]

    def expected_wait_s(self, generation: Generation) -> float | None:
        """Until a lane begins with it, as far as rates are known; None when it does not wait."""
        found = self._queue.position(generation.request.id, self._clock())
        return found and self._seconds(found[1] + min((run.work_s for run in self._runs.values()), default=0.0))

    def running(self, lane: str) -> int:
        """Requests dispatched to the lane and not yet ended."""
        return sum(run.seat.lane == lane for run in self._runs.values())

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones end for `grace_s`, then cancels them. Leaves no task behind."""
        self._closing = True
        self._unsubscribe()
        self._drop_waiting(Closing("the server is shutting down"))
        running = [run.task for run in self._runs.values() if run.task]
        if running and grace_s > 0:
            await asyncio.wait(running, timeout=grace_s)
        for run in list(self._runs.values()):
            run.generation.cancel()
            run.generation.end(Closing("the server is shutting down"))
        running = [run.task for run in self._runs.values() if run.task]
        if running:
            await asyncio.wait(running, timeout=limits.DOOR_CLOSE_S)
        if self._wake is not None:
            self._wake.cancel()
        await self._tasks.cancel()

    # --- admission

    def _check_room(self, tenant: Tenant, size_bytes: int, timeout_s: float = math.inf) -> None:
        try:
            self._queue.check_room(tenant, size_bytes)
            if timeout_s < math.inf and self._placer.rates.measured and timeout_s < self._seconds(self._queue.tokens()):
                raise QueueFull("the queue is longer than the request's timeout")
        except QueueFull as error:
            each_s = self._seconds(self._queue.tokens() / max(1, len(self._queue)))
            error.retry_after_s = min(max(each_s, limits.RETRY_AFTER_S), limits.RETRY_AFTER_MAX_S)
            raise

    def _seconds(self, tokens: float) -> float:
        ready = [view.name for view in self._roster.lanes() if view.state == "ready"]
        return tokens / self._placer.tokens_per_s(ready) if ready else 0.0

    def _hopeful(self) -> bool:
        return any(map(is_hopeful, self._roster.lanes()))

    # --- placement

    def _pump(self) -> None:
        """Gives waiting requests to free lanes, in fair order, as far as that goes."""
        if self._closing or not len(self._queue):
            return
        if not self._hopeful():
            self._drop_waiting(NoLane("no lane is in service"))
            return
        ready = []
        for view in self._roster.lanes():
            if view.state == "ready":
                seat = Seat(view.name, view.incarnation)
                self._placer.counted(seat, counted(view.counters))
                if seat not in self._resting:
                    ready.append(seat)
        while len(self._queue) and (self._place_next(ready) or self._visit_next(ready)):
            pass

    def _place_next(self, ready: list[Seat]) -> bool:
        """Dispatches the first request that has a lane; whether there was one."""
        now = self._clock()
        busy_s: dict[Seat, list[float]] = {seat: [] for seat in ready}
        for run in self._runs.values():
            if run.seat in busy_s and not self._visits.visits(run):
                busy_s[run.seat].append(run.left_s(now))
        if all(len(left_s) >= limits.LANE_CAPACITY for left_s in busy_s.values()):
            return False
        look = self._placer.look(busy_s, limits.LANE_CAPACITY)
        order = [entry for entry, _ in itertools.islice(self._queue.order(now), limits.LOOKAHEAD)]
        first = first_to_begin(
            order, lambda entry: self._placer.propose(entry.job(), look), lambda entry: entry.waited_s(now)
        )
        if isinstance(first, float):
            self._look_again(first)
            return False
        self._dispatch(*first, now)
        return True

    def _visit_next(self, ready: list[Seat]) -> bool:
        """Dispatches the first request that may interrupt a lane's reading; whether there was one."""
        views, now = self._roster.lanes(), self._clock()
        hosts = self._visits.hosts(ready, views, now)
        look = self._visits.look(hosts)
        for entry, ticket in itertools.islice(self._queue.order(now), limits.LOOKAHEAD if hosts else 0):
            if found := self._visits.find(hosts, look, entry.job(), ticket.priority, views, now):
                self._dispatch(entry, found.placed, now, found)
                return True
        return False

    def _look_again(self, seconds: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_later(seconds, self._pump)

    def _dispatch(self, entry: Entry, placed: Placed, now: float, visit: Found | None = None) -> None:
        generation, seat, ticket = entry.generation, placed.seat, entry.ticket
        self._queue.take(ticket, now)
        self._placer.placed(entry.job(), seat)
        if session := generation.request.session:
            self._kept.asked(ticket.tenant.name, session, len(generation.request.prompt_ids), entry.chains, now)
        entry.could_have_begun = None
        if not entry.charged:  # who lost a lane does not pay twice
            entry.charged = placed.tokens
            self._shares.charge(ticket.tenant.name, ticket.flow, placed.tokens, ticket.tenant.weight)
        # counted from here on, before the lane has answered
        run = self._runs[ticket.id] = LaneRun(generation, seat, placed.work_s, now, placed.read_s)
        if visit is not None:
            self._visits.began(run, visit)
        _log.info(
            "dispatched", request_id=ticket.id, lane=seat.lane, replayed=generation.tokens_seen, visits=bool(visit)
        )
        run.task = self._tasks.spawn(self._run(run, entry))

    # --- one running request

    async def _run(self, run: LaneRun, entry: Entry) -> None:
        generation, seat = run.generation, run.seat
        carrier: asyncio.Task[None] | None = None
        try:
            client = self._roster.client(seat.lane)
            carrier = self._tasks.spawn(run.carry_cancel(client, self._suspect))
            end = await run.read(client, self._pump)
            self._resting.well(seat)
            if run.lane_at_fault:  # its process ends; so may another one's that is asked the same, so only once
                self._on_loss(run, entry, end, weight=limits.REPLAYS)
            else:
                generation.end(end)
        except LaneBusy:
            if not self._visits.refused(run):
                self._resting.busy(seat)
            self._hand_back(run, entry)
        except LaneRejected as error:
            generation.end(error)
        except (LaneError, KeyError) as error:
            self._on_loss(run, entry, error)
        except asyncio.CancelledError:
            if not run.gone:
                generation.end(Closing("the server is shutting down"))
                raise
            self._on_loss(run, entry, LaneLost(f"{seat.lane} went away"))
        except Exception:
            _log.exception("dispatch failed", request_id=generation.request.id, lane=seat.lane)
            generation.end(InternalError("internal error"))
        finally:
            if carrier is not None:
                carrier.cancel()
            self._runs.pop(generation.request.id, None)
            self._visits.ended(run, self._clock())
            self._pump()

    def _on_loss(self, run: LaneRun, entry: Entry, why: object, weight: int = 1) -> None:
        """The lane, or the connection to it, went away with the request."""
        generation, name = run.generation, run.seat.lane
        if not run.gone:
            self._resting.lost(run.seat, generation.request.id)
            self._suspect(name)
        if generation.ended:
            return
        entry.losses += weight
        if completed := generation.completed():
            generation.end(completed)
        elif entry.losses > limits.REPLAYS:
            sent = f" after {generation.tokens_seen} tokens of this answer" if generation.lane else ""
            lost = LaneLost(f"{name} went away{sent}; so did the lanes before it")
            generation.end(why if isinstance(why, LaneFailed) and run.lane_at_fault else lost)
        else:
            self._hand_back(run, entry)

    def _hand_back(self, run: LaneRun, entry: Entry) -> None:
        generation = run.generation
        if generation.ended:
            return
        if generation.cancel_wanted.is_set():
            generation.end(Cancelled("cancelled"))
        elif self._closing:
            generation.end(Closing("the server is shutting down"))
        else:
            _log.info("handed back", request_id=entry.ticket.id, lane=run.seat.lane, tokens=generation.tokens_seen)
            self._queue.hand_back(entry, entry.ticket)

    # --- ends

    def _on_cancel(self, generation: Generation) -> None:
        if self._queue.remove(generation.request.id):
            generation.end(Cancelled("cancelled"))
            self._pump()

    def _expire(self, request_id: str) -> None:
        generation = self._entries[request_id].generation
        self._queue.remove(request_id)
        generation.end(DeadlineExceeded(f"not done within {generation.request.timeout_s:g} s"))
        generation.cancel_wanted.set()

    def _drop_waiting(self, error: CoordinatorError) -> None:
        for entry in self._queue.items():
            self._queue.remove(entry.ticket.id)
            entry.generation.end(error)

    def _on_end(self, generation: Generation, end: Ended | CoordinatorError) -> None:
        """Called once per request, when its end is decided."""
        entry = self._entries.pop(generation.request.id)
        entry.expiry.cancel()
        ticket, sent = entry.ticket, generation.tokens_seen
        if isinstance(end, Ended):
            reason = lane_pb2.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower()
            had = end.usage.prompt_tokens - end.usage.cached_tokens + sent
            self._shares.charge(ticket.tenant.name, ticket.flow, had - entry.charged, ticket.tenant.weight)
            if end.reason != lane_pb2.FINISH_REASON_CANCELLED:
                self._placer.lengths.ended(sent)
        else:
            reason = end.code
        self._shares.leave(ticket.tenant.name, ticket.flow)
        self._admission.leave(ticket.tenant, sent, self._clock())
        _log.info("ended", request_id=ticket.id, lane=generation.lane, reason=reason, tokens=sent)

    # --- lanes

    def _suspect(self, lane: str) -> None:
        if any(view.name == lane for view in self._roster.lanes()):
            self._roster.report_suspect(lane)

    def _on_roster(self) -> None:
        views = self._roster.lanes()
        living = {Seat(view.name, view.incarnation) for view in views}
        self._placer.keep({view.name for view in views})
        self._resting.keep(living)
        for run in self._runs.values():
            if run.seat not in living:  # a lane that is only suspected keeps its process, and the stream may go on
                run.gone = True
                if run.task is not None:
                    run.task.cancel()
        self._pump()
