"""Who is let in: requests and tokens per minute, and requests at once, of every tenant.

Not here: room in the queue (fair_queue), what a request may say (request). Pure. Invariants: a bucket holds a minute's
worth and fills evenly; whoever has anything left is let in and then pays the whole price, so that a request larger than
a minute's worth is served, too, and the next one waits for it; what was refused costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.errors import RateLimited, TenantBusy
from coordinator.tenants import Tenant

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """What is left of a minute's worth; below zero while it is owed."""

    left: float
    at: float

    def fill(self, per_minute: int, now: float) -> None:
        self.left = min(float(per_minute), self.left + max(0.0, now - self.at) * per_minute / _MINUTE_S)
        self.at = now

    def until(self, enough: float, per_minute: int) -> float:
        """Seconds until so much is left."""
        return (enough - self.left) * _MINUTE_S / per_minute


@dataclass(slots=True)
class _Account:
    requests: _Bucket
    tokens: _Bucket
    at_once: int = 0


class Admission:
    """The accounts of all tenants seen so far: as many as the table has."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def admit(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Lets a request in and charges it, or raises `RateLimited` or `TenantBusy`."""
        account = self._account(tenant, now)
        if tenant.concurrency is not None and account.at_once >= tenant.concurrency:
            raise TenantBusy(f"all {tenant.concurrency} requests at once that this tenant may have are there")
        waits_s: dict[str, float] = {}
        if tenant.requests_per_minute is not None and account.requests.left < 1.0:
            waits_s[f"{tenant.requests_per_minute} requests"] = account.requests.until(1.0, tenant.requests_per_minute)
        if tenant.tokens_per_minute is not None and account.tokens.left <= 0.0:
            waits_s[f"{tenant.tokens_per_minute} tokens"] = account.tokens.until(1.0, tenant.tokens_per_minute)
        if waits_s:
            quota = max(waits_s, key=lambda each: waits_s[each])
            raise RateLimited(f"over {quota} per minute", retry_after_s=waits_s[quota])
        account.requests.left -= 1.0
        account.tokens.left -= prompt_tokens
        account.at_once += 1

    def leave(self, tenant: Tenant, output_tokens: int, now: float) -> None:
        """A request that was let in has ended; its output is charged."""
        account = self._account(tenant, now)
        account.tokens.left -= output_tokens
        account.at_once -= 1
        assert account.at_once >= 0, "who leaves was let in"

    def _account(self, tenant: Tenant, now: float) -> _Account:
        requests, tokens = tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0
        account = self._accounts.get(tenant.name)
        if account is None:
            account = _Account(_Bucket(float(requests), now), _Bucket(float(tokens), now))
            self._accounts[tenant.name] = account
        account.requests.fill(requests, now)
        account.tokens.fill(tokens, now)
        return account
