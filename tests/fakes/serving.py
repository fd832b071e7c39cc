"""`expressway serve` as a child process of a test: in directories of its own, awaited, gone at the end.

Not a fake: it stands here because several folders use it.
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
import time
from pathlib import Path

START_LIMIT_S = 150.0
END_LIMIT_S = 60.0


def cli(*arguments: object, env: dict[str, str] | None = None, **more) -> subprocess.CompletedProcess[str]:
    """`expressway ARGUMENTS…`, to its end."""
    argv = [sys.executable, "-m", "coordinator.cli", *map(str, arguments)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=START_LIMIT_S, **more)


def tiny_pack(folder: Path, experts: str = "q4g32") -> Path:
    """A small random model, packed by the command line."""
    from bench.checkpoint import write_checkpoint
    from bench.tiny_model import PRESETS

    write_checkpoint(folder / "checkpoint", PRESETS["tiny"])
    done = cli("pack", folder / "checkpoint", folder / "pack", "--experts", experts, "--json")
    assert done.returncode == 0, done.stderr
    return folder / "pack"


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition, limit_s: float = END_LIMIT_S) -> None:
    """Polls a condition of the outside world."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


def remove(folder: Path) -> None:
    """Removes a folder that killed processes may still be leaving: they go a moment after their supervisor."""
    deadline = time.monotonic() + END_LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


class Served:
    """A cluster that serves. `pids` and `cluster` are read anew on every access.

    With another cluster's XDG variables in `environ` it is a second cluster of the same user.
    """

    def __init__(self, pack: Path, *options: object, name: str = "default", **environ: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp"))  # short: sockets lie in it
        (self.folder / "run").mkdir(mode=0o700)
        xdg = {"XDG_RUNTIME_DIR": f"{self.folder}/run", "XDG_STATE_HOME": f"{self.folder}/state"}
        self.env = {**os.environ, **xdg, **environ}
        self.grpc = f"unix:{self.folder}/grpc.sock"
        argv = [sys.executable, "-m", "coordinator.cli", "serve", pack, "--ready-json", "--http", "127.0.0.1:0",
                "--grpc", self.grpc, "--page", "127.0.0.1:0", "--cluster", name, *options]  # fmt: skip
        self.stderr = (self.folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            list(map(str, argv)), env=self.env, stdout=subprocess.PIPE, stderr=self.stderr, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.run_dir = Path(self.env["XDG_RUNTIME_DIR"]) / "expressway" / name
        self.seen_pids: set[int] = {self.process.pid}

    def __enter__(self) -> Served:
        try:
            line = self.process.stdout.readline()
            assert line, self.said()
            self.ready = json.loads(line)
            assert self.pids
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()
        remove(self.folder)

    @property
    def cluster(self) -> dict[str, object]:
        """`cluster.json` now."""
        return json.loads((self.run_dir / "cluster.json").read_text())

    @property
    def pids(self) -> dict[str, int]:
        """Process ids now, 0 for what does not run."""
        pids = self.cluster["pids"]
        self.seen_pids |= set(pids.values()) - {0}
        return pids

    def kill(self, name: str) -> int:
        """SIGKILL to one of its processes; its old id, once `cluster.json` has a new one."""
        before = self.pids[name]
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: self.pids[name] not in (0, before))
        return before

    def said(self) -> str:
        """What it wrote for people."""
        self.stderr.flush()
        return (self.folder / "stderr").read_text()

    def log(self, name: str) -> str:
        """The log of one of its processes."""
        with contextlib.suppress(FileNotFoundError):
            return (Path(self.env["XDG_STATE_HOME"]) / "expressway" / self.name / "log" / f"{name}.log").read_text()
        return ""

    def status(self) -> dict:
        """`expressway status --json`."""
        done = cli("status", "--cluster", self.name, "--json", env=self.env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def states(self) -> dict[str, str]:
        """State of each lane, {} while the door does not answer."""
        done = cli("status", "--cluster", self.name, "--json", env=self.env)
        return {lane["lane"]: lane["state"] for lane in json.loads(done.stdout or "{}").get("lanes", [])}

    def generate(self, *options: object) -> dict:
        """`expressway generate --address … --json`."""
        done = cli("generate", "--address", self.grpc, "--json", *options, env=self.env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(END_LIMIT_S)
