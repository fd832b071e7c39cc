"""The table of tenants: what is read, what is refused, and that no key is ever shown."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.errors import BadTenants
from coordinator.tenants import ANYONE, Priority, Tenant, Tenants, hash_key


def parsed(*entries: dict[str, object]) -> Tenants:
    return Tenants.parse(json.dumps({"tenants": entries}).encode())


def test_a_key_finds_its_tenant_and_no_other_does() -> None:
    table = parsed(
        {"name": "ci", "priority": "batch", "tokens_per_minute": 5, "keys": [hash_key("a"), hash_key("b")]},
        {"name": "dev", "priority": "interactive", "concurrency": 2, "weight": 2.5, "keys": [hash_key("c")]},
    )
    assert table.of_key("a") == table.of_key("b") == Tenant("ci", Priority.BATCH, tokens_per_minute=5)
    assert table.of_key("c") == Tenant("dev", Priority.INTERACTIVE, concurrency=2, weight=2.5)
    assert table.of_key("d") is table.of_key("") is table.of_key(hash_key("a")) is None
    assert table.of_key(b"\xff\xfe".decode(errors="surrogateescape")) is None  # any bytes of a header


def test_without_a_file_one_tenant_has_the_queue() -> None:
    assert (ANYONE.queue_requests, ANYONE.ceiling) == (limits.QUEUE_REQUESTS, Priority.INTERACTIVE)
    assert Tenant("x").queue_requests == limits.QUEUE_TENANT_REQUESTS


@pytest.mark.parametrize(
    "entry",
    [
        {}, {"name": ""}, {"name": "A"}, {"name": "a", "keys": ["secret-key"]}, {"name": "a", "keys": "x"},
        {"name": "a", "priority": "system"}, {"name": "a", "concurrency": 0}, {"name": "a", "concurrency": "3"},
        {"name": "a", "queue_requests": limits.QUEUE_REQUESTS + 1}, {"name": "a", "weight": 0},
        {"name": "a", "requests_per_minute": True}, {"name": "a", "unknown": 1},
        {"name": "a", "keys": [hash_key("k"), hash_key("k")]},
    ],
)  # fmt: skip
def test_what_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(BadTenants) as error:
        parsed(entry)
    assert "secret" not in error.value.message


def test_names_and_keys_are_unique() -> None:
    with pytest.raises(BadTenants, match="twice"):
        parsed({"name": "a"}, {"name": "a"})
    with pytest.raises(BadTenants, match="twice"):
        parsed({"name": "a", "keys": [hash_key("k")]}, {"name": "b", "keys": [hash_key("k")]})


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_refused(data: bytes) -> None:
    with contextlib.suppress(BadTenants):
        Tenants.parse(data)


def test_the_file_is_ours_alone_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [{"name": "a", "keys": [hash_key("k")]}]}))
    path.chmod(0o644)
    with pytest.raises(BadTenants, match="chmod 600"):
        Tenants.load(path)
    path.chmod(0o600)
    assert Tenants.load(path).of_key("k") == Tenant("a")
    with pytest.raises(BadTenants):
        Tenants.load(tmp_path)
    with pytest.raises(BadTenants):
        Tenants.load(tmp_path / "missing")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BadTenants):
        Tenants.load(tmp_path / "link")
    monkeypatch.setattr(limits, "TENANTS_FILE_BYTES", path.stat().st_size)
    Tenants.load(path)
    monkeypatch.setattr(limits, "TENANTS_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(BadTenants, match="over"):
        Tenants.load(path)
