"""A running `expressway serve` as a child process: started, awaited, asked for its addresses, stopped.

Not here: what is asked of it (client) and what is measured (aligned, memory). Invariant: leaving the context manager
leaves no process of the cluster behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

STOP_TIMEOUT_S = 45.0


class ClusterFailed(RuntimeError):
    """The server ended before it was ready; the message carries its exit code."""


def free_address(preferred_port: int) -> str:
    """127.0.0.1 with `preferred_port` when nobody listens there, else with a port that the kernel picks."""
    for port in (preferred_port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{probe.getsockname()[1]}"
    raise ClusterFailed("no free port on 127.0.0.1")


class Cluster:
    """`expressway serve PACK …` until the `with` block ends.

    After entering: `http`, `grpc`, `page` (addresses; no page: empty), `pids` by process name, `run_dir`, `ready_s`.
    Raises ClusterFailed when the server ends before it is ready.
    """

    http: str
    grpc: str
    page: str
    pids: dict[str, int]
    run_dir: Path
    ready_s: float

    def __init__(self, pack: Path, options: Sequence[str] = (), *, quiet: bool = False) -> None:
        self._argv = [sys.executable, "-m", "coordinator.cli", "serve", str(pack), "--ready-json", *options]
        self._quiet = quiet

    def __enter__(self) -> Cluster:
        self._process = subprocess.Popen(
            self._argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._quiet else None,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # its own group: a Ctrl-C at the terminal reaches us first, and we stop it in order
            start_new_session=True,
        )
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _await_ready(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            ready = json.loads(line)
            if ready.get("ready"):
                self.http, self.grpc = ready["http"], ready["grpc"]
                self.page = ready["page"] or ""
                self.pids = {name: int(pid) for name, pid in ready["pids"].items()}
                self.run_dir, self.ready_s = Path(ready["run_dir"]), float(ready["ready_s"])
                threading.Thread(target=self._drain, daemon=True).start()
                return
        raise ClusterFailed(f"expressway serve ended with code {self._process.wait()} before it was ready")

    def _drain(self) -> None:
        """Keeps the pipe empty, so that the server never waits for a reader."""
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            pass

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after a bounded wait; the exit code. Safe to call again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()
