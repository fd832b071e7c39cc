"""The checks of `expressway doctor`: each looks at one thing and says ok, warn or fail, with a remedy.

Not here: printing. Invariant: looking changes nothing on the host, and no check raises.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coordinator.config import DEFAULT_GRPC, DEFAULT_HTTP, Address, choose_address
from coordinator.errors import RunDirError, SetupError
from coordinator.launchers.base import module_argv
from coordinator.rundir import LONGEST_SOCKET_NAME, check_private, check_socket_path, run_path

CHILD_TIMEOUT_S = 60.0
LOW_MEMORY_BYTES = 4 << 30
SMALL_MEMLOCK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """As `--json` prints it."""
        return {"name": self.name, "state": self.state, "found": self.found, "remedy": self.remedy}


def run_checks(cluster: str, http: str | None, grpc: str | None, env: Mapping[str, str]) -> list[Check]:
    """All checks, in the order in which a start would meet the trouble."""
    return [
        compiler(),
        native_code(env),
        memory(Path("/proc/meminfo").read_text()),
        memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        huge_pages(Path("/sys/kernel/mm/hugepages/hugepages-2048kB")),
        ray_environment(env),
        run_directory(cluster, env),
        port("HTTP port", http or DEFAULT_HTTP, asked=http is not None),
        port("gRPC address", grpc or DEFAULT_GRPC, asked=grpc is not None),
    ]


def compiler() -> Check:
    """Needed when the package is installed, not afterwards."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return Check("compiler", "ok", found)
    return Check("compiler", "warn", "no C++ compiler", "needed only to install again: apt-get install g++")


def native_code(env: Mapping[str, str]) -> Check:
    """Asks a lane's own code, in a process of its own: this one never loads torch or the kernel."""
    name = "native kernel"
    remedy = "install a C++17 compiler (apt-get install g++) and install this package again"
    try:
        done = subprocess.run(
            module_argv("lanes", "--version"), env=dict(env), capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
        kernel = json.loads(done.stdout)["kernel"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return Check(name, "fail", "`python -m lanes --version` does not work", "install this package again")
    if "error" in kernel:
        return Check(name, "fail", str(kernel["error"]), remedy)
    isa = str(kernel["isa"])
    if isa == "scalar":
        return Check(name, "warn", "scalar code only: no AVX2 here", "experts on the CPU will be slow on this machine")
    return Check(name, "ok", f"built, best instruction set {isa}")


def memory(meminfo: str) -> Check:
    """The region takes the size of a pack's experts.bin; each CPU lane its cache and dense weights."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if match is None:
        return Check("memory", "warn", "cannot be read")
    available = int(match[1]) << 10
    text = f"{available / (1 << 30):.1f} GiB available"
    if available < LOW_MEMORY_BYTES:
        return Check("memory", "warn", text, "the experts of a pack must fit: compare with `expressway inspect PACK`")
    return Check("memory", "ok", text)


def memlock(limit_bytes: int) -> Check:
    """Pinned memory on GPU lanes counts against it."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "no limit")
    text = f"at most {limit_bytes >> 20} MiB"
    if limit_bytes < SMALL_MEMLOCK_BYTES:
        return Check(
            "locked memory", "warn", text, "GPU lanes pin the region: ulimit -l unlimited (CPU lanes do not care)"
        )
    return Check("locked memory", "ok", text)


def huge_pages(pool: Path) -> Check:
    """2 MiB pages make the region's pages cheaper; without them 4 KiB pages serve."""
    try:
        free = int((pool / "free_hugepages").read_text())
    except (OSError, ValueError):
        return Check("huge pages", "ok", "none on this kernel; 4 KiB pages serve")
    if free == 0:
        return Check("huge pages", "ok", "none reserved; 4 KiB pages serve (vm.nr_hugepages reserves some)")
    return Check("huge pages", "ok", f"{free} free of 2 MiB, {free / 512:.1f} GiB")


def ray_environment(env: Mapping[str, str]) -> Check:
    """`--launcher ray` starts a Ray of its own and ignores these, which may surprise."""
    found = sorted(name for name in env if name.startswith("RAY_"))
    if found:
        remedy = "unset them if you expected them to matter"
        return Check("Ray", "warn", f"{', '.join(found)} set, and ignored by --launcher ray", remedy)
    return Check("Ray", "ok", "nothing set in the environment")


def run_directory(cluster: str, env: Mapping[str, str]) -> Check:
    """Must be ours alone, and short enough for sockets."""
    try:
        path = run_path(cluster, env)
        check_socket_path(path / LONGEST_SOCKET_NAME)
        if path.exists():
            check_private(path, below="expressway")
    except RunDirError as error:
        return Check("run directory", "fail", error.message)
    root = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(root, os.W_OK | os.X_OK):
        return Check(
            "run directory", "fail", f"{path}: {root} is not writable", "set XDG_RUNTIME_DIR or XDG_STATE_HOME"
        )
    return Check("run directory", "ok", str(path))


def port(name: str, text: str, *, asked: bool) -> Check:
    """Whether it could be listened on now. A default that is taken is a warning: it may be ours."""
    try:
        address = Address.parse(text)
        choose_address(address, remove_stale=False)
    except SetupError as error:
        return Check(name, "fail" if asked else "warn", error.message, "choose another with --http or --grpc")
    return Check(name, "ok", f"{address} is free")
