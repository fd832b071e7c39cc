"""Quotas: at the limit and one past it, when there is room again, and that a refusal costs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import RateLimited, Refused, TenantBusy
from coordinator.policy.admission import Admission
from coordinator.tenants import Tenant


def test_requests_per_minute() -> None:
    admission, tenant = Admission(), Tenant("t", requests_per_minute=60)
    for _ in range(60):
        admission.admit(tenant, 1, 0.0)
    with pytest.raises(RateLimited) as error:
        admission.admit(tenant, 1, 0.0)
    assert error.value.retry_after_s == pytest.approx(1.0)
    with pytest.raises(RateLimited):
        admission.admit(tenant, 1, 0.9)
    admission.admit(tenant, 1, 1.0)
    admission.admit(Tenant("other", requests_per_minute=1), 1, 1.0)  # its own bucket


def test_tokens_per_minute_are_paid_after_the_fact() -> None:
    admission, tenant = Admission(), Tenant("t", tokens_per_minute=600)
    admission.admit(tenant, 599, 0.0)
    admission.admit(tenant, 1200, 0.0)  # one is left: served, and owed
    with pytest.raises(RateLimited) as error:
        admission.admit(tenant, 1, 0.0)
    assert error.value.retry_after_s == pytest.approx(120.0, abs=0.2)
    admission.leave(tenant, 600, 0.0)  # output counts, too
    with pytest.raises(RateLimited) as error:
        admission.admit(tenant, 1, 0.0)
    assert error.value.retry_after_s == pytest.approx(180.0, abs=0.2)
    admission.admit(tenant, 1, 181.0)


def test_requests_at_once() -> None:
    admission, tenant = Admission(), Tenant("t", concurrency=2)
    admission.admit(tenant, 1, 0.0)
    admission.admit(tenant, 1, 0.0)
    with pytest.raises(TenantBusy):
        admission.admit(tenant, 1, 0.0)
    admission.leave(tenant, 5, 0.0)
    admission.admit(tenant, 1, 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=60),
    st.integers(1, 100), st.integers(1, 2000),
)  # fmt: skip
def test_no_minute_holds_more_than_twice_what_is_allowed_and_who_waits_as_told_is_let_in(steps, rpm, tpm) -> None:
    admission, tenant, now = Admission(), Tenant("t", requests_per_minute=rpm, tokens_per_minute=tpm), 0.0
    let_in: list[tuple[float, int]] = []
    for pause_s, tokens in steps:
        now += pause_s
        try:
            admission.admit(tenant, tokens, now)
        except Refused as refusal:
            now += (refusal.retry_after_s or 0.0) + 1e-6
            admission.admit(tenant, tokens, now)
        let_in.append((now, tokens))
    for at, _ in let_in:
        minute = [tokens for when, tokens in let_in if at <= when < at + 60]
        assert len(minute) <= 2 * rpm + 1
        assert sum(minute[:-1]) <= 2 * tpm + max(minute)
