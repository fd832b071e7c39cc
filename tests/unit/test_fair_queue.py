"""The queue's order and bounds: fair by tokens among tenants, then agents; classes with ageing; nobody starves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import limits
from coordinator.errors import QueueFull
from coordinator.policy.fair_queue import FairQueue, Ticket
from coordinator.policy.families import Families
from coordinator.policy.shares import Shares
from coordinator.tenants import ANYONE, Priority, Tenant

A, B = Tenant("a"), Tenant("b")


class Desk:
    """A queue with its shares, as dispatch uses them."""

    def __init__(self, bound: int = 256) -> None:
        self.shares = Shares()
        self.queue: FairQueue[str] = FairQueue(bound, self.shares)
        self.tickets: dict[str, Ticket] = {}
        self._count = 0

    def add(
        self, tenant: Tenant = A, flow: str = "", tokens: float = 100, priority: Priority = Priority.DEFAULT,
        now: float = 0.0, size_bytes: int = 1,
    ) -> str:  # fmt: skip
        self._count += 1
        name = f"{tenant.name}{self._count}"
        ticket = Ticket(name, tenant, flow, priority, tokens, size_bytes, now)
        self.queue.check_room(tenant, size_bytes)
        self.shares.enter(tenant.name, flow)
        self.queue.push(name, ticket)
        self.tickets[name] = ticket
        return name

    def take(self, now: float = 0.0) -> str:
        """The next one leaves and is charged."""
        name, ticket = next(self.queue.order(now))
        self.queue.take(ticket, now)
        self.shares.charge(ticket.tenant.name, ticket.flow, ticket.tokens, ticket.tenant.weight)
        return name

    def end(self, name: str) -> None:
        self.shares.leave(self.tickets[name].tenant.name, self.tickets[name].flow)

    def order(self, now: float = 0.0) -> list[str]:
        return [name for name, _ in self.queue.order(now)]


def test_one_flow_is_first_come_first_served() -> None:
    desk = Desk()
    names = [desk.add(tokens=tokens) for tokens in (500, 1, 50)]
    assert desk.order() == names
    assert [desk.queue.position(name, 0.0) for name in names] == [(0, 0.0), (1, 500.0), (2, 501.0)]
    assert desk.queue.position("nobody", 0.0) is None


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    desk = Desk()
    large = [desk.add(A, tokens=300) for _ in range(3)]
    small = [desk.add(B, tokens=100) for _ in range(9)]
    expected = [large[0], *small[:3], large[1], *small[3:6], large[2], *small[6:]]
    assert desk.order() == expected
    assert [desk.take() for _ in expected] == expected  # charging one by one gives the order that was foretold


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    desk, heavy = Desk(), Tenant("h", weight=2.0)
    for _ in range(20):
        desk.add(heavy)
        desk.add(B)
    first = [desk.take()[0] for _ in range(18)]
    assert (first.count("h"), first.count("b")) == (12, 6)


def test_agents_of_a_tenant_share_and_many_requests_of_one_win_nothing() -> None:
    desk = Desk()
    swarm = [desk.add(flow="swarm") for _ in range(5)]
    lone = desk.add(flow="lone")
    assert desk.order() == [swarm[0], lone, *swarm[1:]]


def test_a_tenant_that_comes_back_is_owed_a_little_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARE_CREDIT", 250.0)
    desk = Desk()
    early = desk.add(B)
    desk.take()
    desk.end(early)
    for _ in range(50):
        desk.add(A)
        desk.end(desk.take())
    keeper = desk.add(A)
    returned = [desk.add(B) for _ in range(5)]
    more = [desk.add(A) for _ in range(5)]
    order = desk.order()
    assert order.index(keeper) == 3  # two whole requests of 100 are owed, and the third begins below
    assert abs(order.index(returned[4]) - order.index(more[1])) <= 2


def test_somebody_new_is_owed_nothing_and_flows_never_are() -> None:
    desk = Desk()
    desk.add(A, "rare")
    desk.end(desk.take())
    for _ in range(50):
        desk.add(A, "known")
        desk.end(desk.take())
    keeper = desk.add(A, "known")
    new = [desk.add(B) for _ in range(3)]
    assert desk.order().index(keeper) <= 1
    for name in new:
        desk.queue.remove(name)
        desk.end(name)
    rare = [desk.add(A, "rare") for _ in range(3)]
    assert desk.order() == [keeper, *rare]


def test_better_classes_first_and_waiting_makes_better() -> None:
    desk, at = Desk(), limits.AGEING_S
    batch = desk.add(ANYONE, priority=Priority.BATCH, now=0.0)
    default = desk.add(ANYONE, priority=Priority.DEFAULT, now=1.0)
    interactive = desk.add(ANYONE, priority=Priority.INTERACTIVE, now=2.0)
    assert desk.order(3.0) == [interactive, default, batch]
    assert desk.order(at - 0.001) == [interactive, default, batch]
    assert desk.order(at) == [interactive, batch, default]  # of one class now, and it came first
    assert desk.order(2 * at) == [batch, default, interactive]


def test_a_long_line_gets_no_better_by_its_length() -> None:
    desk, loud, calm = Desk(), Tenant("loud", queue_requests=256), Tenant("calm")
    for second in range(200):
        desk.add(loud, now=float(second) / 10)
    now = 20.0
    for _ in range(20):
        now += 5.0
        mine = desk.add(calm, now=now)
        taken = [desk.take(now) for _ in range(2)]
        assert mine in taken  # though all of the others have waited far longer
        for name in taken:
            desk.end(name)


def test_what_a_lane_handed_back_is_before_all_others() -> None:
    desk = Desk()
    first, second, third = (desk.add(ANYONE, priority=Priority.INTERACTIVE) for _ in range(3))
    assert (desk.take(), desk.take()) == (first, second)
    desk.queue.hand_back(second, desk.tickets[second])
    desk.queue.hand_back(first, desk.tickets[first])
    assert desk.order() == [first, second, third]


def test_bounds_in_requests_bytes_and_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(bound=3)
    names = [desk.add() for _ in range(3)]
    with pytest.raises(QueueFull, match="3 places"):
        desk.add(B)
    desk.queue.hand_back("x", replace(desk.tickets[names[0]], id="x"))  # was admitted once
    assert desk.queue.remove("x")
    assert not desk.queue.remove("x")
    assert desk.queue.remove(names[1])
    desk.add(B)
    desk = Desk()
    few = Tenant("few", queue_requests=2)
    mine = [desk.add(few) for _ in range(2)]
    with pytest.raises(QueueFull, match="this tenant"):
        desk.add(few)
    desk.add(B)
    desk.queue.remove(mine[0])
    desk.add(few)
    monkeypatch.setattr(limits, "QUEUE_BYTES", 100)
    desk = Desk()
    held = desk.add(size_bytes=60)
    desk.add(size_bytes=40)
    with pytest.raises(QueueFull, match="MiB"):
        desk.add(size_bytes=1)
    desk.queue.remove(held)
    desk.add(size_bytes=60)


def test_a_family_is_one_flow_however_deep() -> None:
    families = Families(100)
    assert families.of("t", "top", None) == "top"
    assert families.of("t", "sub", "top") == "top"
    assert families.of("t", "subsub", "sub") == "top"
    assert families.of("t", "sub", None) == "top"  # remembered
    assert families.of("other", "sub", None) == "sub"  # of this tenant only
    assert families.of("t", None, "sub") == "top"
    assert families.of("t", None, None) == ""
    assert families.of("t", "self", "self") == "self"
    assert {families.of("t", "x", "y"), families.of("t", "y", "x")} <= {"x", "y"}


def test_families_and_idle_accounts_are_forgotten_at_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    families = Families(2)
    for number in range(10):
        families.of("t", f"s{number}", "top")
    assert len(families) == 2
    monkeypatch.setattr(limits, "SHARE_ACCOUNTS", 3)
    shares = Shares()
    for number in range(5):
        shares.enter("t", f"{number}")
    for number in range(5):  # active ones are never forgotten
        assert shares.of_flow("t", f"{number}") == 0
    for number in range(5):
        shares.leave("t", f"{number}")
    with pytest.raises(KeyError):
        shares.of_flow("t", "1")
    assert shares.of_flow("t", "4") == 0


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([A, B, Tenant("c", weight=3.0)]), st.sampled_from(["", "x", "y"]),
        st.integers(1, 5000), st.sampled_from(list(Priority)),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=100)
@given(REQUESTS, st.floats(0, 25))  # nobody ages: being served makes a class young again
def test_the_order_foretold_is_the_order_taken_and_holds_everybody_once(requests, now) -> None:
    desk = Desk()
    for number, (tenant, flow, tokens, priority) in enumerate(requests):
        desk.add(tenant, flow, tokens, priority, now=number / 10)
    now += len(requests) / 10
    foretold = desk.order(now)
    assert sorted(foretold) == sorted(desk.tickets)
    waiting = dict(desk.tickets)
    for name in foretold:
        assert desk.queue.tokens() == sum(ticket.tokens for ticket in waiting.values())  # whole numbers: exact
        assert desk.take(now) == name
        del waiting[name]
    assert len(desk.queue) == desk.queue.tokens() == 0


@settings(max_examples=50)
@given(st.integers(1, 400), st.integers(1, 400))
def test_while_two_tenants_wait_neither_is_ahead_by_more_than_one_request_each(a_tokens, b_tokens) -> None:
    desk = Desk()
    for _ in range(32):
        desk.add(A, tokens=a_tokens)
        desk.add(B, tokens=b_tokens)
    had = {"a": 0, "b": 0}
    left = {"a": 32, "b": 32}
    while all(left.values()):
        name = desk.take()[0]
        had[name] += a_tokens if name == "a" else b_tokens
        left[name] -= 1
        assert abs(had["a"] - had["b"]) <= a_tokens + b_tokens


def test_batch_is_served_in_the_end_whatever_comes() -> None:
    desk = Desk()
    batch = desk.add(B, priority=Priority.BATCH, now=0.0)
    for second in range(1, 200):
        desk.add(Tenant("i", Priority.INTERACTIVE), priority=Priority.INTERACTIVE, now=float(second))
        if (taken := desk.take(float(second))) == batch:
            break
        desk.end(taken)
    assert second <= 2 * limits.AGEING_S + 1
