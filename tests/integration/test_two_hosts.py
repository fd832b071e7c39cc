"""Two hosts of a real Ray cluster, each a network namespace, as one Expressway: an owner and a region on each, lanes of
both under one coordinator. Ray's control store stands still, the cable is cut, a host is killed: no request fails.

Takes minutes and rights to make network namespaces: only with EXPRESSWAY_TWO_HOSTS=1. EXPRESSWAY_GCS_OUTAGE_S=60 makes
the outage of Ray's control store the long one whose figures are in bench/LOG.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.serving import START_LIMIT_S, gone, remove, tiny_pack, wait_for

SCRIPT = Path(__file__).parents[2] / "deploy/ray/serve_every_host.py"
OUTAGE_S = float(os.environ.get("EXPRESSWAY_GCS_OUTAGE_S", "5"))
PORT = 6399


def run(*argv: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=check, timeout=START_LIMIT_S)


def may_make_namespaces() -> bool:
    asked = os.environ.get("EXPRESSWAY_TWO_HOSTS") == "1"
    return (
        asked
        and bool(shutil.which("ip"))
        and os.geteuid() == 0
        and run("unshare", "-n", "true", check=False).returncode == 0
    )


@dataclass
class Host:
    """A network namespace with directories of its own; both hosts share the file system of this one."""

    name: str
    address: str
    folder: Path
    end: str  # of the cable
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for made in ("run", "state", "config"):
            (self.folder / made).mkdir(mode=0o700, parents=True, exist_ok=True)
        return {
            **plain,
            "XDG_RUNTIME_DIR": f"{self.folder}/run",
            "XDG_STATE_HOME": f"{self.folder}/state",
            "XDG_CONFIG_HOME": f"{self.folder}/config",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{plain['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{self.folder.parent}/token",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_failure_threshold": "20",  # as in deploy/ray: Ray gives a host up after a minute
        }

    def spawn(self, *argv: object) -> subprocess.Popen[str]:
        with (self.folder / f"log{len(self.started)}").open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *map(str, argv)],
                env=self.env, stdout=log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def ray(self, *options: object) -> subprocess.Popen[str]:
        """A Ray node of this host, as long as the process."""
        return self.spawn(
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", self.address,
            "--num-cpus", 1, "--object-store-memory", 100_000_000, *options,
        )  # fmt: skip

    def expressway(self, *words: object) -> subprocess.CompletedProcess[str]:
        argv = ["ip", "netns", "exec", self.name, sys.executable, "-m", "coordinator.cli", *map(str, words)]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=START_LIMIT_S)

    def status(self) -> dict:
        done = self.expressway("status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def states(self) -> dict[str, str]:
        return {lane["lane"]: lane["state"] for lane in self.status().get("lanes", [])}

    def answer(self, tokens: int = 8) -> list[int]:
        asked = ("generate", "--address", "127.0.0.1:8001", "--prompt-ids", "5,6,7", "--max-tokens", tokens, "--json")
        done = self.expressway(*asked)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"]

    def pids(self) -> list[str]:
        return run("ip", "netns", "pids", self.name).stdout.split()

    def owners(self) -> list[str]:
        """Owners of a region in this namespace."""
        return [pid for pid in self.pids() if b"shared_experts" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log*")))


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    folder, mark = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp")), os.getpid() % 10_000
    (folder / "token").write_text("t" * 64)
    (folder / "token").chmod(0o600)
    ends = [f"ve{mark}{which}" for which in "ab"]
    hosts = tuple(
        Host(f"exw{mark}{which}", f"10.77.0.{k}", folder / which, end)
        for (k, which), end in zip(((1, "a"), (2, "b")), ends, strict=True)
    )
    try:
        for host in hosts:
            run("ip", "netns", "add", host.name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            run("ip", "link", "set", end, "netns", host.name)
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", end)
            for device in ("lo", end):
                run("ip", "-n", host.name, "link", "set", device, "up")
        yield hosts  # type: ignore[misc]
    finally:
        for host in hosts:
            for process in reversed(host.started):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(30)
        for host in hosts:
            left = run("ip", "netns", "pids", host.name, check=False).stdout.split()
            for pid in map(int, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda left=left: all(gone(int(pid)) for pid in left))
            for process in host.started:
                process.wait()
            run("ip", "netns", "del", host.name, check=False)
        remove(folder)


def invite(head: Host, other: Host) -> None:
    """The cluster's certificates, each where its host looks for it."""
    for host in (head, other):
        assert host.env  # makes its folders
    assert head.expressway("cluster", "init").returncode == 0
    made = head.expressway("cluster", "invite", "b", "--json")
    place = other.folder / "config/expressway/hosts/host.pem"
    place.parent.mkdir(parents=True)
    shutil.copy(json.loads(made.stdout)["file"], place)  # with its mode


@contextlib.contextmanager
def asking(host: Host, answers: list[list[int]], askers: int = 2) -> Iterator[None]:
    """Asks that host again and again, from several threads."""
    stop, failed = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(host.answer())
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=ask) for _ in range(askers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


BOTH = {"lane-0": "ready", "b/lane-0": "ready"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not may_make_namespaces(), reason="not asked for, or no rights to make network namespaces")
def test_two_hosts_are_one_cluster_and_no_request_fails_whatever_goes(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path, "f32")
    with two_hosts() as (head, other):
        try:
            program = f'#!/bin/sh\nexec {sys.executable} -m coordinator.cli "$@"\n'
            for host in (head, other):
                (host.folder / "bin").mkdir(parents=True)
                (host.folder / "bin/expressway").write_text(program)
                (host.folder / "bin/expressway").chmod(0o755)
            invite(head, other)
            directory = f"{head.folder.parent}/ray"
            head.ray("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", directory)
            wait_for(lambda: "Ray runtime started" in head.logs())
            other.ray("--address", f"{head.address}:{PORT}")
            keeper = head.spawn(
                sys.executable, SCRIPT, pack, "--address", f"{head.address}:{PORT}", "--",
                "--lanes", 1, "--drafts", 0, "--", "--page", "off",
            )  # fmt: skip
            wait_for(lambda: head.states() == BOTH, 2 * START_LIMIT_S)
            owners = [host.owners() for host in (head, other)]
            assert [len(each) for each in owners] == [1, 1]
            truth = head.answer()

            (store,) = [pid for pid in head.pids() if Path(f"/proc/{pid}/comm").read_text().startswith("gcs_server")]
            answers: list[list[int]] = []
            os.kill(int(store), signal.SIGSTOP)
            with asking(head, answers):
                time.sleep(OUTAGE_S)
            os.kill(int(store), signal.SIGCONT)
            print(f"{len(answers)} requests on the two hosts in {OUTAGE_S:g} s without Ray's control store")
            assert answers
            assert answers == [truth] * len(answers)
            assert head.states() == BOTH

            for what in ("the cable is cut", "the host is killed"):
                answers.clear()
                with asking(head, answers):
                    began = time.monotonic()
                    if what == "the cable is cut":
                        run("ip", "-n", other.name, "link", "set", other.end, "down")
                    else:
                        for pid in other.pids():
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(int(pid), signal.SIGKILL)
                    wait_for(lambda: head.states().get("b/lane-0") == "dead", START_LIMIT_S)
                    gone_s = time.monotonic() - began
                    if what == "the cable is cut":
                        assert other.owners() == owners[1]  # it lives, alone
                        run("ip", "-n", other.name, "link", "set", other.end, "up")
                    else:
                        other.ray("--address", f"{head.address}:{PORT}")
                    wait_for(lambda: head.states() == BOTH, 2 * START_LIMIT_S)
                    back_s = time.monotonic() - began
                print(f"{what}: dead after {gone_s:.1f} s, back after {back_s:.1f} s, {len(answers)} requests")
                assert answers == [truth] * len(answers)
            assert keeper.poll() is None
            assert head.owners() == owners[0]
        except BaseException:
            print(head.logs(), other.logs(), file=sys.stderr)
            raise
