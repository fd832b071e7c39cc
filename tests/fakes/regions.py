"""A small synthetic pack (manifest and experts.bin), regions made of it, and an owner process that needs no pack.

Run as a program it is that owner process: `python -m tests.fakes.regions RUN_DIR EXPERTS SEED KILL_AT [REGIONS]` serves
until SIGTERM, and with KILL_AT (else -1) kills itself at that call of the step callback.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from shared_experts import fill, memfd
from shared_experts.errors import RegionUnavailable
from shared_experts.handoff import RegionStatus, ask
from shared_experts.layout import F32, RecordLayout
from shared_experts.manifest import ExpertsInfo, Manifest, Section
from shared_experts.owner import Owner, OwnerConfig
from shared_experts.region import RegionShape
from tests.fakes.descriptors import hand_off_sockets, held

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 3, 32, 16


def records(seed: int = 0) -> bytes:
    size = RecordLayout.of(F32, HIDDEN, INTERMEDIATE).record_bytes
    return random.Random(seed).randbytes(LAYERS * EXPERTS * size)


def manifest(seed: int = 0) -> Manifest:
    data, record = records(seed), RecordLayout.of(F32, HIDDEN, INTERMEDIATE).record_bytes
    size = EXPERTS * record
    sections = tuple(
        Section(f"experts.{i}", "experts.bin", i * size, size, hashlib.sha256(data[i * size : (i + 1) * size]).digest())
        for i in range(LAYERS)
    )
    fingerprint = hashlib.sha256(b"".join(s.sha256 for s in sections)).digest()
    info = ExpertsInfo("f32", HIDDEN, INTERMEDIATE, LAYERS, 0, EXPERTS, record)
    return Manifest("tiny", "qwen4_exp", {}, info, "f32", (), sections, fingerprint, "test")


def shape(seed: int = 0) -> RegionShape:
    return RegionShape.of(manifest(seed))


def write_experts(path: Path, seed: int = 0) -> Path:
    path.write_bytes(records(seed))
    return path


def build(folder: Path, seed: int = 0) -> fill.SealedRegion:
    """A real region, small pages; the descriptor is the caller's."""
    path = write_experts(folder / f"experts-{seed}.bin", seed)
    return fill.build(path, shape(seed), threads=2, on_step=lambda *_: None, huge_pages=False)


def forged(
    content: bytes, *, size: int | None = None, seals: int = memfd.REQUIRED_SEALS, writable: bool = False
) -> int:
    """A memfd with any content, size, seals and access mode."""
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content) if size is None else size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    if writable:
        return fd
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return reader


def start_owner(
    run_dir: Path, experts: Path, seed: int = 0, kill_at: int = -1, regions: Path | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fakes.regions", *map(str, (run_dir, experts, seed, kill_at))]
    return subprocess.Popen([*command, *([str(regions)] if regions else [])], cwd=ROOT, stderr=subprocess.PIPE)


def wait_ready(socket: Path, limit_s: float = 30.0) -> RegionStatus:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            status, _ = ask(socket, "status", timeout_s=2.0)
            if status.state == "ready":
                return status
        except RegionUnavailable:
            pass
        assert time.monotonic() < deadline_s, f"{socket}: not ready after {limit_s} s"
        time.sleep(0.02)


def open_descriptors() -> int:
    """Those of memory files, of tests' files and of hand-offs that this process has, once a server thread in it has
    let go of finished connections."""
    counts = [-1]
    while len(counts) < 6 or len(set(counts[-5:])) > 1:
        counts.append(len(held("/memfd:") + held("/pytest-") + hand_off_sockets()))
        time.sleep(0.01)
    return counts[-1]


def main() -> None:
    run_dir, experts, seed, kill_at, *meeting = sys.argv[1:]
    fill.CHUNK_BYTES = 4096  # many steps out of a tiny file
    calls, lock = 0, threading.Lock()

    def on_step(step: str, done_bytes: int) -> None:
        nonlocal calls
        with lock:
            if calls == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    config = OwnerConfig(
        Path(run_dir), Path(experts), shape(int(seed)), 2, huge_pages=False,
        regions_dir=Path(meeting[0]) if meeting else None,
    )  # fmt: skip
    owner = Owner(config, on_step=on_step)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=owner.stop).start())
    owner.run()


if __name__ == "__main__":
    main()
