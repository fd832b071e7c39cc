"""The hand-off under hostile peers on both ends: typed refusals, nothing leaks, the server goes on."""

import array
import contextlib
import os
import socket
import threading
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts import descriptor_server, handoff, listening
from shared_experts.attach import attach
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import HandoffError, RegionBusy, RegionError, RegionMismatch, RegionUnavailable
from shared_experts.handoff import RegionStatus, ask, decode_request, decode_status, encode_request, encode_status
from tests.fakes import regions

READY = RegionStatus("ready", "built", 100, 100, regions.manifest().fingerprint, b"g" * 16, os.getpid())
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@contextlib.contextmanager
def rogue(path, *messages):
    """A server that answers each connection in turn with (bytes, descriptors), or closes it on None."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(8)
    listener.settimeout(10)

    def serve():
        for message in messages:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                if message is not None:
                    data, fds = message
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                    connection.sendmsg([data], rights)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()
        os.unlink(path)


class TestWords:
    @given(st.binary(max_size=1100))
    def test_random_bytes(self, data):
        for decode in (decode_request, decode_status):
            with contextlib.suppress(HandoffError):
                decode(data)

    @given(JSONISH)
    @settings(max_examples=200)
    def test_well_formed_msgpack_of_the_wrong_kind(self, value):
        data = msgpack.packb(value)
        for decode in (decode_request, decode_status):
            with pytest.raises(HandoffError):
                decode(data)

    @given(st.sampled_from(["v", "state", "source", "done", "total", "fingerprint", "generation", "pid"]), JSONISH)
    def test_one_field_replaced_or_missing(self, field, value):
        fields = msgpack.unpackb(encode_status(READY))
        good = fields.pop(field)
        with pytest.raises(HandoffError):
            decode_status(msgpack.packb(fields))
        if type(value) is type(good):
            return  # may be in range
        with pytest.raises(HandoffError):
            decode_status(msgpack.packb({**fields, field: value}))

    @pytest.mark.parametrize(
        "change",
        [{"state": "done"}, {"source": "bought"}, {"done": -1}, {"done": 101}, {"total": 1 << 63}, {"done": True},
         {"pid": 0}, {"pid": 1 << 31}, {"fingerprint": b"x" * 31}, {"generation": b"x" * 17}, {"v": 2}, {"extra": 1}],
    )  # fmt: skip
    def test_out_of_range(self, change):
        with pytest.raises(HandoffError):
            decode_status(msgpack.packb({**msgpack.unpackb(encode_status(READY)), **change}))

    def test_round_trip_and_size(self):
        assert decode_status(encode_status(READY)) == READY
        assert [decode_request(encode_request(w)) for w in handoff.WANTS] == list(handoff.WANTS)
        biggest = replace(READY, done_bytes=(1 << 63) - 1, total_bytes=(1 << 63) - 1, pid=(1 << 31) - 1)
        assert len(encode_status(biggest)) <= handoff.MESSAGE_MAX_BYTES

    def test_trailing_bytes_and_the_size_bound(self):
        with pytest.raises(HandoffError):
            decode_request(encode_request("status") + b"\0")
        padded = {"v": 1, "want": "x" * 2000}
        with pytest.raises(HandoffError, match="more than 1024"):
            decode_request(msgpack.packb(padded))


class TestHostileServer:
    """What a lane does about a process that holds the owner's name and lies."""

    def refused(self, tmp_path, error, message):
        before = regions.open_descriptors()
        with rogue(tmp_path / "s", message), pytest.raises(error) as caught:
            attach(tmp_path / "s", regions.manifest(), 0.2 if error is RegionUnavailable else 5.0)
        assert regions.open_descriptors() == before
        return caught.value

    def test_garbage_closed_connection_and_refusal(self, tmp_path):
        self.refused(tmp_path, HandoffError, (b"\xc1garbage", []))
        self.refused(tmp_path, HandoffError, (b"x" * 2000, []))
        assert "refused: 'no'" in str(self.refused(tmp_path, HandoffError, (handoff.encode_refusal("no"), [])))
        self.refused(tmp_path, RegionUnavailable, None)

    @settings(max_examples=20)
    @given(st.binary(min_size=1, max_size=64))
    def test_random_reply_with_a_descriptor(self, tmp_path_factory, data):
        fd = regions.forged(b"lent")
        try:
            self.refused(tmp_path_factory.mktemp("rogue"), HandoffError, (data, [fd]))
        finally:
            os.close(fd)

    def test_wrong_number_of_descriptors(self, tmp_path):
        fd = regions.forged(b"lent")
        for count in (0, 2, 4, 5, 60):  # past four the kernel has no room and says so
            self.refused(tmp_path, HandoffError, (encode_status(READY), [fd] * count))
        filling = replace(READY, state="filling", source="")
        self.refused(tmp_path, HandoffError, (encode_status(filling), [fd]))
        os.close(fd)

    def test_descriptor_of_something_else(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(bytes(1 << 16))
        read_end, write_end = os.pipe()
        others = [os.open(name, os.O_RDONLY) for name in (path, tmp_path, "/dev/null")]
        others += [read_end, regions.forged(bytes(1 << 16), seals=0)]
        for fd in others:
            assert self.refused(tmp_path, RegionMismatch, (encode_status(READY), [fd])).check == "seals"
            os.close(fd)
        os.close(write_end)

    def test_a_silent_server_costs_the_time_limit_only(self, tmp_path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen(1)
            with pytest.raises(RegionUnavailable, match="timed out"):
                ask(tmp_path / "s", "status", timeout_s=0.1)
            waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
            for client in waiting:  # fills the backlog
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(str(tmp_path / "s"))
            with pytest.raises(RegionUnavailable):
                ask(tmp_path / "s", "status", timeout_s=0.1)
            for client in waiting:
                client.close()

    def test_foreign_user(self, tmp_path, monkeypatch):
        monkeypatch.setattr(handoff, "peer_uid", lambda _: os.geteuid() + 1)
        with DescriptorServer(tmp_path / "s", lambda: (READY, None)), pytest.raises(HandoffError, match="another user"):
            ask(tmp_path / "s", "status", timeout_s=5.0)


@pytest.fixture
def region(tmp_path):
    built = regions.build(tmp_path)
    yield built
    os.close(built.fd)


@pytest.fixture
def server(region, tmp_path):
    ready = replace(READY, generation=region.header.generation)
    with DescriptorServer(tmp_path / "s", lambda: (ready, region.fd)) as serving:
        yield serving


def client(server) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(server.path)
    return connection


def still_serves(server) -> None:
    status, fd = ask(server.path, "descriptor", timeout_s=10.0)
    assert status.state == "ready"
    os.close(fd)


class TestHostileClient:
    def test_random_bytes_are_refused_and_the_server_goes_on(self, server):
        @settings(max_examples=50)
        @given(st.binary(min_size=1, max_size=1100))
        def check(data):
            with client(server) as connection:
                connection.send(data)
                message, fds = handoff.receive(connection)
                assert fds == []
                with pytest.raises(HandoffError, match="refused"):
                    decode_status(message)

        check()
        still_serves(server)

    def test_status_lends_nothing(self, server):
        assert ask(server.path, "status", timeout_s=5.0)[1] is None

    def test_descriptors_sent_to_the_server_do_not_arrive(self, server):
        before = regions.open_descriptors()
        fd = regions.forged(b"lent")
        for _ in range(50):
            with client(server) as connection:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 8))]
                connection.sendmsg([encode_request("status")], rights)
                message, fds = handoff.receive(connection)
                assert decode_status(message).state == "ready"
                assert fds == []
        os.close(fd)
        assert regions.open_descriptors() == before

    def test_silent_clients_are_bounded_and_the_oldest_gives_way(self, server):
        silent = [client(server) for _ in range(descriptor_server.CONNECTIONS_MAX + 5)]
        still_serves(server)
        assert [c.recv(10) for c in silent[:6]] == [b""] * 6  # five too many and the one that `still_serves` displaced
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(10)
        for connection in silent:
            connection.close()
        still_serves(server)

    def test_silent_clients_are_dropped_in_time(self, server, monkeypatch):
        monkeypatch.setattr(descriptor_server, "CONNECTION_LIMIT_S", 0.05)
        with client(server) as connection:
            assert connection.recv(10) == b""

    def test_clients_that_vanish(self, server):
        for _ in range(50):
            connection = client(server)
            connection.send(encode_request("descriptor"))
            connection.close()
        still_serves(server)

    def test_foreign_user_is_turned_away(self, server, monkeypatch):
        monkeypatch.setattr(listening, "peer_uid", lambda _: os.geteuid() + 1)
        with client(server) as connection:
            with contextlib.suppress(OSError):
                connection.send(encode_request("descriptor"))
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(10) == b""
        monkeypatch.undo()
        still_serves(server)

    def test_an_answer_that_fails_ends_one_connection_only(self, tmp_path, region, capsys):
        answers = [ZeroDivisionError(), (READY, region.fd)]

        def answer():
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        with DescriptorServer(tmp_path / "s", answer) as serving:
            with pytest.raises(RegionUnavailable):
                ask(serving.path, "status", timeout_s=5.0)
            still_serves(serving)


class TestName:
    def test_mode_and_removal(self, tmp_path, region):
        old = os.umask(0)
        try:
            with DescriptorServer(tmp_path / "s", lambda: (READY, region.fd)):
                assert os.stat(tmp_path / "s").st_mode & 0o777 == 0o600
                assert sorted(p.name for p in tmp_path.iterdir() if p.is_socket()) == ["s"]
        finally:
            os.umask(old)
        assert not (tmp_path / "s").exists()

    def test_a_dead_servers_name_is_replaced_a_living_ones_is_not(self, tmp_path, region):
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dead.bind(str(tmp_path / "s"))
        dead.close()
        first = DescriptorServer(tmp_path / "s", lambda: (READY, region.fd))
        first.start()
        with pytest.raises(RegionBusy):
            DescriptorServer(tmp_path / "s", lambda: (READY, region.fd)).start()
        still_serves(first)
        first.close()
        first.close()

    def test_somebody_elses_name_is_left_alone(self, tmp_path, region):
        server = DescriptorServer(tmp_path / "s", lambda: (READY, region.fd))
        server.start()
        (tmp_path / "s").unlink()
        (tmp_path / "s").write_text("not a socket")
        server.close()
        assert (tmp_path / "s").read_text() == "not a socket"
        with pytest.raises(RegionError, match="not a socket"):
            server.start()

    def test_path_too_long(self, tmp_path):
        path = tmp_path / ("x" * 108)
        with pytest.raises(RegionError, match="107 bytes"):
            DescriptorServer(path, lambda: (READY, None))
        with pytest.raises(RegionError, match="107 bytes"):
            ask(path, "status", timeout_s=1.0)

    def test_no_descriptor_stays(self, tmp_path, region):
        before = regions.open_descriptors()
        for _ in range(5):
            with DescriptorServer(tmp_path / "s", lambda: (READY, region.fd)) as server:
                still_serves(server)
        assert regions.open_descriptors() == before
        with pytest.raises(RegionError):
            DescriptorServer(tmp_path / "none" / "s", lambda: (READY, region.fd)).start()
        assert regions.open_descriptors() == before
