"""How much everybody has had: tokens by tenant, and by flow (an agent with its sub-agents) within a tenant.

    due first: the tenant with the fewest tokens (over its weight), in it the flow with the fewest

Not here: who waits (fair_queue). Pure. Invariants: whoever comes back after a while without requests starts no lower
than the least of those that are active, a tenant at most `limits.SHARE_CREDIT` tokens lower, so nobody saves up a right
to be served alone; what was charged and not used is given back; idle accounts are forgotten oldest first, past
`limits.SHARE_ACCOUNTS`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from coordinator import limits


@dataclass(slots=True)
class _Account:
    tokens: float = 0.0
    active: int = 0  # requests that wait or run


@dataclass(slots=True)
class _Group:
    """Accounts that compete with each other."""

    credit: float = 0.0  # tokens that who comes back may be owed
    accounts: dict[str, _Account] = field(default_factory=dict)
    idle: OrderedDict[str, None] = field(default_factory=OrderedDict)  # names without requests, longest so first
    floor: float = 0.0  # never falls: the least that an active account had

    def enter(self, name: str) -> None:
        account = self.accounts.get(name)
        if account is None:
            self.raise_floor()
            account = self.accounts[name] = _Account(self.floor)
        elif account.active == 0:
            self.raise_floor()
            account.tokens = max(account.tokens, self.floor - self.credit)
            self.idle.pop(name, None)
        account.active += 1

    def leave(self, name: str) -> None:
        self.raise_floor()
        self.accounts[name].active -= 1
        if self.accounts[name].active == 0:
            self.idle[name] = None
        while self.idle and len(self.accounts) > limits.SHARE_ACCOUNTS:
            del self.accounts[self.idle.popitem(last=False)[0]]

    def raise_floor(self) -> None:
        if len(self.accounts) > len(self.idle):
            least = min(self.accounts[name].tokens for name in self.accounts.keys() - self.idle.keys())
            self.floor = max(self.floor, least)


class Shares:
    """Accounts of two levels."""

    def __init__(self) -> None:
        self._tenants = _Group(limits.SHARE_CREDIT)
        self._flows: dict[str, _Group] = {}

    def enter(self, tenant: str, flow: str) -> None:
        """A request of theirs is there, waiting or running."""
        self._tenants.enter(tenant)
        self._flows.setdefault(tenant, _Group()).enter(flow)

    def leave(self, tenant: str, flow: str) -> None:
        """It has ended."""
        self._flows[tenant].leave(flow)
        self._tenants.leave(tenant)
        if len(self._flows) > len(self._tenants.accounts):
            for forgotten in self._flows.keys() - self._tenants.accounts.keys():
                del self._flows[forgotten]

    def charge(self, tenant: str, flow: str, tokens: float, weight: float) -> None:
        """They have had so many tokens; negative: fewer than was thought. Only while a request of theirs is there."""
        self._tenants.accounts[tenant].tokens += tokens / weight
        self._flows[tenant].accounts[flow].tokens += tokens

    def of_tenant(self, tenant: str) -> float:
        """What it has had, over its weight."""
        return self._tenants.accounts[tenant].tokens

    def of_flow(self, tenant: str, flow: str) -> float:
        """What it has had."""
        return self._flows[tenant].accounts[flow].tokens
