"""Real owner and lane processes on a tiny pack, for tests that kill them. Every process dies with its context."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from bench.checkpoint import write_checkpoint
from bench.tiny_model import TinyConfig
from laneproto.v1 import lane_pb2 as pb
from laneproto.v1 import lane_pb2_grpc as rpc
from shared_experts.convert import convert
from shared_experts.layout import EXPERT_FORMATS
from tests.fakes.regions import wait_ready

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0


@functools.cache
def _pack(experts: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="expressway-test-pack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    inner = max(32, EXPERT_FORMATS[experts].group)  # q8 and q4g64 have groups of 64
    config = TinyConfig(num_hidden_layers=4, moe_intermediate_size=inner)
    source = write_checkpoint(folder / "tiny", config, 0, tokenizer=False)
    convert(source, folder / "tiny.pack", experts=experts, dense="f32", threads=1)
    return folder / "tiny.pack"


def tiny_pack(folder: Path, experts: str = "q4g32") -> Path:
    """A tiny random model's pack in `folder`; yours to damage."""
    target = folder / f"{experts}.pack"
    if not target.exists():
        shutil.copytree(_pack(experts), target)
    return target


class Process:
    """A child with its log file."""

    def __init__(self, arguments: list[str], log: Path, **environ: str) -> None:
        self.log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, stdout=out, stderr=out, env={**os.environ, **environ}
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.popen.wait(START_LIMIT_S)

    def text(self) -> str:
        return self.log.read_text()

    def until(self, words: str) -> str:
        """Waits for words in the log; returns the log."""
        end = time.monotonic() + START_LIMIT_S
        while words not in self.text():
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.text()}"
            assert time.monotonic() < end, self.text()
            time.sleep(0.02)
        return self.text()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Host:
    """One run directory with an owner and lanes; pass it a pack."""

    def __init__(self, pack: Path, folder: Path) -> None:
        self.pack, self.folder = pack, folder
        self.run = folder / "run"
        self.run.mkdir(mode=0o700, exist_ok=True)
        self._processes: list[Process] = []
        self._logs = 0

    def start(self, *arguments: str, **environ: str) -> Process:
        self._logs += 1
        process = Process(list(arguments), self.folder / f"log-{self._logs}", **environ)
        self._processes.append(process)
        return process

    def forget(self, process: Process) -> None:
        """A process that has ended, and its log, as if it had never been."""
        process.close()
        self._processes.remove(process)
        process.log.unlink()

    def owner(self, *options: str) -> Process:
        """An owner, region ready."""
        process = self.start("shared_experts", "own", "--pack", str(self.pack), "--run-dir", str(self.run), *options)
        wait_ready(self.run / "owner.sock", START_LIMIT_S)
        return process

    def lane(self, name: str = "lane-0", *options: str, pack: Path | None = None, **environ: str) -> Process:
        """A lane process, not yet ready."""
        core = min(os.sched_getaffinity(0))
        return self.start(
            "lanes", "--owner", str(self.run / "owner.sock"), "--pack", str(pack or self.pack), "--listen",
            self.address(name), "--vram-budget", "64KiB", "--name", name, "--cores", str(core), "--log-json", *options,
            **environ,
        )  # fmt: skip

    def ready_lane(self, name: str = "lane-0", *options: str, **environ: str) -> Process:
        """A lane that is ready."""
        process = self.lane(name, *options, **environ)
        process.until("lane_ready")
        return process

    def address(self, name: str = "lane-0") -> str:
        return f"unix:{self.run / name}.sock"

    @contextlib.contextmanager
    def stub(self, name: str = "lane-0") -> Iterator[rpc.LaneStub]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.address(name), options=options) as channel:
            yield rpc.LaneStub(channel)

    def ask(self, name: str = "lane-0", **changes: object) -> tuple[list[int], pb.Finished]:
        """A whole answer: ids and the end."""
        with self.stub(name) as stub:
            return collect(stub.Generate(message(**changes)))

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.close()


def message(**changes: object) -> pb.GenerateRequest:
    fields: dict[str, object] = {"request_id": "r", "prompt_ids": [5, 9, 11], "max_tokens": 16}
    return pb.GenerateRequest(**(fields | changes))  # type: ignore[arg-type]


def collect(events: Iterator[pb.GenerateEvent]) -> tuple[list[int], pb.Finished]:
    """Ids and the end of a stream; checks the order of events."""
    seen = list(events)
    kinds = [event.WhichOneof("event") for event in seen]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"tokens"}
    return [token.id for event in seen for token in event.tokens.tokens], seen[-1].finished
