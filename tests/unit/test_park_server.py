"""The owner's end of the park pool over a real socket: hostile words, bounds, deaths."""

import hashlib
import os
import socket
import time

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_experts import cli_own, host_memory, limits
from shared_experts import park_messages as words
from shared_experts.errors import ParkError, ParkRefused, ParkUnavailable
from shared_experts.park_client import ParkClient
from shared_experts.park_server import ParkServer, fitting_bytes

T = b"t" * 16


@pytest.fixture
def pool(tmp_path):
    with ParkServer(tmp_path / "park.sock", 1 << 20, segment_bytes=4096) as server:
        yield server


@pytest.fixture
def client(pool):
    client = ParkClient(pool.path)
    yield client
    client.close()


def raw(pool):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect(pool.path)
    return connection


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_what_one_writes_another_reads(pool, client):
    data = bytes(range(256)) * 20
    (segments,) = client.lease(T, [(b"p" * 16, len(data))])
    client.memory.write(segments, np.frombuffer(data, np.uint8))
    client.lease(T, [(b"c" * 16, 4), (b"h" * 16, 4)])
    number = client.publish(T, 1, [(100, b"m" * 16, 1)])
    other = ParkClient(pool.path)
    assert other.generation == pool.generation
    sequence, void, more, removed, (entry,) = other.changes(0)
    assert (void, more, removed, entry.marks) == (False, False, [], ((100, b"m" * 16),))
    assert other.changes(sequence)[4] == []
    assert other.pin(number, T)[:2] == (b"h" * 16, 4)
    ((size, where),) = other.where(number, [b"p" * 16])
    out = np.empty(size, np.uint8)
    other.memory.read(where, out)
    assert out.tobytes() == data
    with pytest.raises(ParkRefused):
        other.where(number, [b"x" * 16])
    with pytest.raises(ParkRefused):
        other.pin(number, b"u" * 16)
    other.close()


def test_a_dead_lane_holds_nothing(pool):
    client = ParkClient(pool.path)
    client.lease(T, [(b"p" * 16, 1 << 19)])
    assert pool.index.used_segments
    client.close()
    wait_for(lambda: not pool.index.used_segments)


@pytest.mark.parametrize(
    "message",
    [
        b"", b"\xc1", b"x" * 100, msgpack.packb([1]), msgpack.packb({"op": "hello", "v": words.VERSION + 1}),
        msgpack.packb({"op": "fork"}), msgpack.packb({"op": "lease", "tenant": b"t", "blobs": []}),
        msgpack.packb({"op": "lease", "tenant": T, "blobs": [[b"d" * 16, -1]]}),
        msgpack.packb({"op": "lease", "tenant": T, "blobs": [[b"d" * 16, 1 << 60]]}),
        msgpack.packb({"op": "lease", "tenant": T, "blobs": [[b"d" * 16, True]]}),
        msgpack.packb({"op": "publish", "tenant": T, "pages": 1, "marks": [[1, T, 1]]}),
        msgpack.packb({"op": "publish", "tenant": T, "pages": 0, "marks": [[0, T, 1]]}),
        msgpack.packb({"op": "where", "number": 5, "digests": [b"d" * 16]}),
        msgpack.packb({"op": "changes", "after": "all"}), msgpack.packb({"op": "pin", "number": -1}),
        msgpack.packb({"op": "hello", "v": words.VERSION, "t": msgpack.Timestamp(1)}),
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_harms_nobody(pool, client, message):
    connection = raw(pool)
    connection.send(message)
    reply = connection.recv(1 << 18)
    assert not reply or "refused" in msgpack.unpackb(reply)
    connection.close()
    assert client.changes(0)[4] == []
    client.abandon()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["op", "tenant", "blobs", "pages", "marks", "after", "number", "digests", "v"]),
        st.recursive(
            st.one_of(
                st.sampled_from(["lease", "publish", "changes", "pin", "where", "unpin", "abandon"]),
                st.integers(-5, 1 << 40), st.just(T), st.binary(max_size=20), st.booleans(), st.none(),
            ),
            lambda inner: st.lists(inner, max_size=4),
        ),
    )
)  # fmt: skip
def test_whatever_is_sent_the_owner_answers_the_next(pool, fields):
    connection = raw(pool)
    connection.send(msgpack.packb(fields))
    connection.recv(1 << 18)
    connection.close()
    after = ParkClient(pool.path)
    after.changes(0)
    after.close()


def test_the_size_of_a_message_is_bounded(pool):
    size = limits.PARK_MESSAGE_BYTES
    with pytest.raises(ParkRefused):
        words.decode(b"\x80" + b"x" * size)
    assert words.decode(msgpack.packb({"op": "hello"}))["op"] == "hello"
    with pytest.raises(ParkRefused):
        words.encode({"pad": b"x" * size})
    assert words.encode({"pad": b"x" * (size - 20)})
    connection = raw(pool)
    connection.send(b"x" * (size + 1))
    assert "refused" in msgpack.unpackb(connection.recv(1 << 18))
    connection.close()


def test_parts_of_a_message_are_bounded(pool):
    most = limits.PARK_BLOBS_PER_MESSAGE
    for count, refused in ((most, False), (most + 1, True)):
        connection = raw(pool)
        blobs = [[os.urandom(16), 0] for _ in range(count)]
        connection.send(msgpack.packb({"op": "lease", "tenant": T, "blobs": blobs}))
        assert ("refused" in msgpack.unpackb(connection.recv(1 << 18))) == refused
        connection.close()


def test_connections_are_bounded(pool, monkeypatch):
    monkeypatch.setattr(limits, "PARK_CONNECTIONS", 2)
    first, second = ParkClient(pool.path), ParkClient(pool.path)
    with pytest.raises(ParkUnavailable):
        ParkClient(pool.path)
    first.changes(0)
    second.close()
    first.close()


def test_the_pool_is_bounded():
    least = ["--pack", "p", "--run-dir", "r", "--park"]
    assert cli_own.own.make_context("own", [*least, str(limits.PARK_POOL_BYTES)]).params["park_bytes"]
    refused = CliRunner().invoke(cli_own.own, [*least, str(limits.PARK_POOL_BYTES + 1)])
    assert refused.exit_code == 2


def test_nobody_there_is_unavailable(tmp_path):
    with pytest.raises(ParkUnavailable):
        ParkClient(tmp_path / "none.sock")


def test_an_owner_that_does_not_answer_costs_a_second(tmp_path, monkeypatch):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "frozen.sock"))
    listener.listen()
    monkeypatch.setattr("shared_experts.park_client.CALL_LIMIT_S", 0.05)
    with pytest.raises(ParkUnavailable):
        ParkClient(tmp_path / "frozen.sock")
    listener.close()


def test_a_pool_that_is_no_pool_is_refused(tmp_path):
    from shared_experts.park_memory import ParkMemory

    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ParkError):
        ParkMemory(fd, 4096)


def test_the_socket_is_ours_alone_and_goes_with_the_owner(tmp_path):
    server = ParkServer(tmp_path / "park.sock", 1 << 20)
    server.start()
    assert (tmp_path / "park.sock").stat().st_mode & 0o777 == 0o600
    server.close()
    server.close()
    assert not (tmp_path / "park.sock").exists()


def test_only_memory_that_was_given_back_is_told(pool, client, monkeypatch):
    for name in (b"1", b"2"):
        client.lease(T, [(name * 16, 4096), (b"c" * 15 + name, 4096), (b"h" * 15 + name, 4096)])
        client.publish(T, 1, [(100, name * 16, 1)])
    short = iter([True, False])
    monkeypatch.setattr(host_memory, "floor_bytes", lambda: 1)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0 if next(short, False) else 2)
    pool._looked_s = 0.0
    wait_for(lambda: client.changes(0) and len(pool.index) == 1)
    client.changes(0)
    assert client.memory.punches == 0, "the first one's segments lie in front of the second one's"
    pool._looked_s, short = 0.0, iter([True, False])
    wait_for(lambda: client.changes(0) and client.memory.punches)
    assert len(pool.index) == 0


@pytest.mark.parametrize(
    ("free", "huge", "size"),
    [(100 << 30, 0, (100 << 30) // 8), (2 << 30, 0, 1 << 30), (0, 0, 1 << 30), (100 << 30, 700, 1400 << 20),
     (100 << 30, 100, (100 << 30) // 8), (1 << 60, 0, limits.PARK_POOL_BYTES)],
)  # fmt: skip
def test_a_pool_whose_size_nobody_told_is_as_the_host_has_room(monkeypatch, free, huge, size):
    monkeypatch.setattr(host_memory, "floor_bytes", lambda: 5)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free + 5)
    monkeypatch.setattr(host_memory, "free_huge_pages", lambda: huge)
    assert fitting_bytes() == size
    least = ["--pack", "p", "--run-dir", "r", "--park"]
    assert cli_own.own.make_context("own", [*least, "auto"]).params["park_bytes"] is None


def test_other_words_are_another_version():
    """Whoever changes the table of words finds this, and says the new version's digest here."""
    told = words.__doc__ or ""
    table = told[told.index("    hello") : told.index("Not here")]
    known = {3: "86cb162f8b886d93"}  # 2 had the same, and other names of large parts
    assert hashlib.sha256(table.encode()).hexdigest()[:16] == known[words.VERSION]
