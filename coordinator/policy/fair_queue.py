"""The requests that wait, in fair order. Pure: no clock, no loop, no knowledge of what a request is.

    handed back by a lane ─▶ interactive ─▶ default ─▶ batch        a class better for every AGEING_S without service
                             └─ tenant with the fewest tokens ─▶ its flow with the fewest ─▶ first come

Not here: who has had how much (shares), which lane (placement). Invariants: at most `bound` requests and
`limits.QUEUE_BYTES`, and of a tenant at most what it may have; a request that is gone has left; a request that a lane
handed back was admitted once and needs no room. A class of a tenant ages only while nothing of it is served: then it is
at the best class in the end, so none starves, and a tenant with a long line gets no better by its length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator import limits
from coordinator.errors import QueueFull
from coordinator.policy.shares import Shares
from coordinator.tenants import Priority, Tenant

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the order of a request depends on."""

    id: str
    tenant: Tenant
    flow: str  # an agent with its sub-agents; empty: requests that name no session
    priority: Priority
    tokens: float  # that it will take, as far as anybody knows: prompt not cached, and output
    size_bytes: int  # of memory while it waits
    arrived: float


@dataclass(slots=True)
class _Waiting(Generic[_T]):
    item: _T
    ticket: Ticket
    number: int  # of arrival; below zero: handed back, the latest first


class FairQueue(Generic[_T]):
    """Waiting requests by id."""

    def __init__(self, bound: int, shares: Shares) -> None:
        self.bound = bound
        self._shares = shares
        self._waiting: dict[str, _Waiting[_T]] = {}
        self._number = self._handed_back = 0
        self._bytes = 0
        self._tokens = 0.0
        self._of_tenant: dict[str, int] = {}
        self._served_at: dict[tuple[str, Priority], float] = {}  # of a tenant's class, last

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def items(self) -> list[_T]:
        """All that wait, in no order that means anything."""
        return [waiting.item for waiting in self._waiting.values()]

    def check_room(self, tenant: Tenant, size_bytes: int) -> None:
        """Raises `QueueFull` when a request of that size has no place."""
        if len(self._waiting) >= self.bound:
            raise QueueFull(f"all {self.bound} places of the queue are taken")
        if self._bytes + size_bytes > limits.QUEUE_BYTES:
            raise QueueFull(f"the queue holds {limits.QUEUE_BYTES >> 20} MiB of requests at most")
        if self._of_tenant.get(tenant.name, 0) >= tenant.queue_requests:
            raise QueueFull(f"all {tenant.queue_requests} places that this tenant has in the queue are taken")

    def push(self, item: _T, ticket: Ticket) -> None:
        """One more; it has been entered in the shares. `QueueFull` when there is no place."""
        self.check_room(ticket.tenant, ticket.size_bytes)
        self._number += 1
        self._add(_Waiting(item, ticket, self._number))

    def hand_back(self, item: _T, ticket: Ticket) -> None:
        """A request that had left the queue and has to wait again: before all others."""
        self._handed_back -= 1
        self._add(_Waiting(item, ticket, self._handed_back))

    def remove(self, request_id: str) -> bool:
        """Takes a request out, wherever it stands; whether it was there."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self._bytes -= waiting.ticket.size_bytes
        self._tokens = self._tokens - waiting.ticket.tokens if self._waiting else 0.0  # rounding ends with the line
        name = waiting.ticket.tenant.name
        self._of_tenant[name] -= 1
        if not self._of_tenant[name]:
            del self._of_tenant[name]
        return True

    def take(self, ticket: Ticket, now: float) -> None:
        """Takes a request out because its turn has come."""
        self.remove(ticket.id)
        self._served_at[ticket.tenant.name, ticket.priority] = now

    def order(self, now: float) -> Iterator[tuple[_T, Ticket]]:
        """In fair order, as if each were charged when its turn comes. Do not change the queue before the last one."""
        levels: dict[int, list[_Waiting[_T]]] = {}
        for waiting in self._waiting.values():
            levels.setdefault(self._level(waiting, now), []).append(waiting)
        ahead: dict[str, float] = {}  # tokens of those before, by tenant and by flow
        ahead_of_flow: dict[tuple[str, str], float] = {}
        for level in sorted(levels):
            for waiting in self._fair(levels[level], ahead, ahead_of_flow):
                yield waiting.item, waiting.ticket

    def position(self, request_id: str, now: float) -> tuple[int, float] | None:
        """How many requests are before this one, and their tokens; None when it does not wait."""
        if request_id not in self._waiting:
            return None
        tokens = 0.0
        for place, (_, ticket) in enumerate(self.order(now)):
            if ticket.id == request_id:
                return place, tokens
            tokens += ticket.tokens
        raise AssertionError("whoever waits is in the order")

    def tokens(self) -> float:
        """Of all that wait."""
        return self._tokens

    def _add(self, waiting: _Waiting[_T]) -> None:
        ticket = waiting.ticket
        assert ticket.id not in self._waiting, "ids are made once"
        self._waiting[ticket.id] = waiting
        self._bytes += ticket.size_bytes
        self._tokens += ticket.tokens
        self._of_tenant[ticket.tenant.name] = self._of_tenant.get(ticket.tenant.name, 0) + 1

    def _fair(
        self, level: list[_Waiting[_T]], ahead: dict[str, float], ahead_of_flow: dict[tuple[str, str], float]
    ) -> Iterator[_Waiting[_T]]:
        level.sort(key=lambda waiting: waiting.number)
        flows: dict[str, dict[str, deque[_Waiting[_T]]]] = {}
        for waiting in level:
            ticket = waiting.ticket
            flows.setdefault(ticket.tenant.name, {}).setdefault(ticket.flow, deque()).append(waiting)
        heaps = {name: self._flow_heap(name, of_name, ahead_of_flow) for name, of_name in flows.items()}
        tenants = [
            (self._shares.of_tenant(name) + ahead.get(name, 0.0), heap[0][1], name) for name, heap in heaps.items()
        ]
        heapq.heapify(tenants)
        while tenants:
            had, _, name = heapq.heappop(tenants)
            flow_had, _, flow = heapq.heappop(heaps[name])
            waiting = flows[name][flow].popleft()
            tokens, weight = waiting.ticket.tokens, waiting.ticket.tenant.weight
            ahead[name] = ahead.get(name, 0.0) + tokens / weight
            ahead_of_flow[name, flow] = ahead_of_flow.get((name, flow), 0.0) + tokens
            if flows[name][flow]:
                heapq.heappush(heaps[name], (flow_had + tokens, flows[name][flow][0].number, flow))
            if heaps[name]:
                heapq.heappush(tenants, (had + tokens / weight, heaps[name][0][1], name))
            yield waiting

    def _flow_heap(
        self, tenant: str, flows: dict[str, deque[_Waiting[_T]]], ahead: dict[tuple[str, str], float]
    ) -> list[tuple[float, int, str]]:
        heap = [
            (self._shares.of_flow(tenant, flow) + ahead.get((tenant, flow), 0.0), waiting[0].number, flow)
            for flow, waiting in flows.items()
        ]
        heapq.heapify(heap)
        return heap

    def _level(self, waiting: _Waiting[_T], now: float) -> int:
        if waiting.number < 0:
            return -1
        ticket = waiting.ticket
        since = max(ticket.arrived, self._served_at.get((ticket.tenant.name, ticket.priority), ticket.arrived))
        aged = int(max(0.0, now - since) / limits.AGEING_S)
        return max(int(Priority.INTERACTIVE), int(ticket.priority) - aged)
