"""Two hosts of one cluster on this machine, each with directories of its own: real regions, lanes and TLS, no Ray."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from laneproto.v1 import serve_pb2, serve_pb2_grpc
from tests.fakes.serving import Served, cli, gone, remove, tiny_pack, wait_for

BOTH = {"lane-0": "ready", "build-2/lane-0": "ready"}
EXACT = ("--drafts", "0", "--context", "2048")  # so that a replayed answer is the same to the token


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Member:
    """`expressway cluster join` as a child, in directories of its own."""

    def __init__(self, pack: Path, head: str, identity: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp"))
        (self.folder / "run").mkdir(mode=0o700)
        env = {**os.environ, "XDG_RUNTIME_DIR": f"{self.folder}/run", "XDG_STATE_HOME": f"{self.folder}/state"}
        argv = [sys.executable, "-m", "coordinator.cli", "cluster", "join", pack, "--head", head, "--listen",
                "127.0.0.1:0", "--identity", identity, "--ready-json", "--log-json", *EXACT]  # fmt: skip
        self.stderr = (self.folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            list(map(str, argv)), env=env, stdout=subprocess.PIPE, stderr=self.stderr, text=True, start_new_session=True
        )
        self.env = env

    def ready(self) -> dict:
        line = self.process.stdout.readline()
        assert line, (self.folder / "stderr").read_text()
        return json.loads(line)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()
        remove(self.folder)


def lanes(served: Served) -> dict[str, serve_pb2.LaneInfo]:
    """By name; asked here, because the command takes longer than an answer."""
    with grpc.insecure_channel(served.grpc) as channel:
        reply = serve_pb2_grpc.ExpresswayStub(channel).ListLanes(serve_pb2.ListLanesRequest(), timeout=60)
    return {lane.lane: lane for lane in reply.lanes}


def states(served: Served) -> dict[str, str]:
    return {name: lane.state for name, lane in lanes(served).items()}


@contextmanager
def joined(pack: Path, head: str, identity: Path) -> Iterator[Member]:
    member = Member(pack, head, identity)
    try:
        yield member
    finally:
        member.end()


@pytest.mark.slow
def test_a_host_joins_is_killed_under_its_stream_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    pack, ids = tiny_pack(tmp_path, "f32"), tmp_path / "ids"
    assert cli("cluster", "init", "--identities", ids).returncode == 0
    identity = Path(json.loads(cli("cluster", "invite", "build-2", "--identities", ids, "--json").stdout)["file"])
    head = f"127.0.0.1:{free_port()}"
    asked = ("--prompt-ids", "5,6,7", "--max-tokens", "1200", "--ignore-eos")
    with Served(pack, "--join-at", head, "--identity", ids / "head.pem", *EXACT) as served:
        truth = served.generate(*asked)["token_ids"]
        assert len(truth) == 1200
        with joined(pack, head, identity) as member:
            ready = member.ready()
            assert (ready["host"], ready["head"]) == ("build-2", head)
            assert states(served) == BOTH
            assert lanes(served)["build-2/lane-0"].host == "build-2"
            assert ready["pids"]["owner"] != served.pids["owner"]  # a region of its own
            refused = cli("status", env=member.env)
            assert f"serves in the cluster of {head}" in refused.stderr
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                answers = [pool.submit(served.generate, *asked) for _ in range(2)]
                wait_for(lambda: all(lane.running for lane in lanes(served).values()))
                member.process.send_signal(signal.SIGKILL)
                assert [answer.result()["token_ids"] for answer in answers] == [truth, truth]
            assert "handed back" in served.log("coordinator")
            wait_for(lambda: all(gone(pid) for pid in ready["pids"].values()))
        with joined(pack, head, identity) as member:
            pids = member.ready()["pids"]
            assert states(served) == BOTH
            member.process.send_signal(signal.SIGTERM)
            assert member.process.wait(60) == 0
            assert all(map(gone, pids.values()))
            wait_for(lambda: states(served) == {"lane-0": "ready"})  # it left, and is not awaited
            assert not list((member.folder / "run/expressway").glob("default/*"))
