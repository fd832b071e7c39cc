"""Two hosts of a real Ray cluster, each a network namespace: a server on each with an owner and a region of its own.

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
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for made in ("run", "state"):
            (self.folder / made).mkdir(mode=0o700, parents=True, exist_ok=True)
        return {
            **plain,
            "XDG_RUNTIME_DIR": f"{self.folder}/run",
            "XDG_STATE_HOME": f"{self.folder}/state",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{plain['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{self.folder.parent}/token",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
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

    def ready(self) -> bool:
        return bool(lanes := self.status().get("lanes")) and all(lane["state"] == "ready" for lane in lanes)

    def answer(self) -> list[int]:
        asked = ("generate", "--address", "127.0.0.1:8001", "--prompt-ids", "5,6,7", "--max-tokens", 8, "--json")
        done = self.expressway(*asked)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log*")))


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    folder, mark = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp")), os.getpid() % 10_000
    (folder / "token").write_text("t" * 64)
    (folder / "token").chmod(0o600)
    hosts = tuple(Host(f"exw{mark}{which}", f"10.77.0.{k}", folder / which) for k, which in ((1, "a"), (2, "b")))
    ends = [f"ve{mark}{which}" for which in "ab"]
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


def served(host: Host, stop: threading.Event, answers: list[list[int]]) -> threading.Thread:
    """Asks that host again and again."""

    def ask() -> None:
        while not stop.is_set():
            answers.append(host.answer())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not may_make_namespaces(), reason="not asked for, or no rights to make network namespaces")
def test_two_hosts_have_an_owner_each_and_serve_while_rays_control_store_stands_still(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path)
    with two_hosts() as (head, other):
        try:
            program = f'#!/bin/sh\nexec {sys.executable} -m coordinator.cli "$@"\n'
            for host in (head, other):
                (host.folder / "bin").mkdir(parents=True)
                (host.folder / "bin/expressway").write_text(program)
                (host.folder / "bin/expressway").chmod(0o755)
            directory = f"{head.folder.parent}/ray"
            head.ray("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", directory)
            wait_for(lambda: "Ray runtime started" in head.logs())
            other.ray("--address", f"{head.address}:{PORT}")
            keeper = head.spawn(
                sys.executable, SCRIPT, pack, "--address", f"{head.address}:{PORT}", "--", "--lanes", 1, "--page", "off"
            )
            for host in (head, other):
                wait_for(host.ready, 2 * START_LIMIT_S)
            owners = [host.status()["pids"]["owner"] for host in (head, other)]
            assert len(set(owners)) == 2
            for host, owner in zip((head, other), owners, strict=True):  # each where it should be
                assert str(owner) in run("ip", "netns", "pids", host.name).stdout.split()
            truth = head.answer()
            assert other.answer() == truth

            (store,) = [
                pid for pid in run("ip", "netns", "pids", head.name).stdout.split()
                if Path(f"/proc/{pid}/comm").read_text().startswith("gcs_server")
            ]  # fmt: skip
            stop, answers = threading.Event(), ([], [])
            os.kill(int(store), signal.SIGSTOP)
            askers = [served(host, stop, each) for host, each in zip((head, other), answers, strict=True)]
            time.sleep(OUTAGE_S)
            os.kill(int(store), signal.SIGCONT)
            stop.set()
            for asker in askers:
                asker.join()
            print(f"{[len(each) for each in answers]} requests of the two hosts in {OUTAGE_S:g} s")
            for each in answers:
                assert each
                assert each == [truth] * len(each)
            assert [host.status()["pids"]["owner"] for host in (head, other)] == owners
            assert keeper.poll() is None
        except BaseException:
            print(head.logs(), other.logs(), file=sys.stderr)
            raise
