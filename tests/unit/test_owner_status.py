"""What an owner says about itself is taken whole or not at all."""

import socket
import threading

import msgpack
import pytest

from coordinator.host.owner_status import OwnerStatus, ask_owner
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.handoff import RegionStatus

GOOD = {"v": 1, "state": "ready", "source": "built", "done": 7, "total": 7, "fingerprint": b"f" * 32,
        "generation": b"g" * 16, "pid": 1}  # fmt: skip


def asked(path, reply: bytes):
    """`ask_owner` of a server that sends these bytes, whatever it was asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.send(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        found = ask_owner(path)
        thread.join()
    return found


def test_the_real_server_is_understood(tmp_path):
    status = RegionStatus("filling", "", 30, 100, b"f" * 32, bytes(16), 1)
    with DescriptorServer(tmp_path / "owner.sock", lambda: (status, None)):
        found = ask_owner(tmp_path / "owner.sock")
    assert found == OwnerStatus("filling", 30, 100, "", b"f" * 32, bytes(16))
    assert str(found) == "filling 30 %"


def test_nobody_there(tmp_path):
    assert ask_owner(tmp_path / "owner.sock") is None


def test_a_good_answer(tmp_path):
    assert asked(tmp_path / "s", msgpack.packb(GOOD)) == OwnerStatus("ready", 7, 7, "built", b"f" * 32, b"g" * 16)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "made up"}, {"state": 1}, {"state": ["ready"]}, {"source": "stolen"}, {"done": "7"}, {"done": -1},
        {"total": None}, {"done": 8}, {"fingerprint": b"short"}, {"fingerprint": "f" * 32}, {"generation": b"g" * 17},
    ],
    ids=str,
)  # fmt: skip
def test_one_wrong_field_is_no_answer(tmp_path, change):
    assert asked(tmp_path / "s", msgpack.packb({**GOOD, **change})) is None


@pytest.mark.parametrize(
    "reply", [b"", b"\xc1", b"[]", msgpack.packb([1]), msgpack.packb({})[:1], b"\xff" * 2000], ids=repr
)
def test_what_is_no_message_is_no_answer(tmp_path, reply):
    assert asked(tmp_path / "s", reply) is None
