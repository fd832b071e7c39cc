"""The checks of `expressway doctor`: each looks at one thing and says ok, warn or fail, with a remedy.

Here: what is installed, the pack, directories and ports; memory and limits are in doctor_host, the rest in doctor_ray
and doctor_gpu. Not here: printing. Invariant: looking changes nothing on the host, and no check raises.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.config import Address, choose_address
from coordinator.errors import RunDirError, SetupError
from coordinator.host.clusters import who_listens
from coordinator.host.rundir import LONGEST_SOCKET_NAME, check_private, check_socket_path, run_path
from coordinator.launchers.base import module_argv

CHILD_TIMEOUT_S = 60.0


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


def compiler() -> Check:
    """Needed when the package is installed, not afterwards."""
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return Check("compiler", "ok", found)
    return Check("compiler", "warn", "no C++ compiler", "needed only to install again: apt-get install g++")


def native_code(env: Mapping[str, str]) -> Check:
    """Asks a lane's own code, in a process of its own: this one never loads torch or a native library."""
    name = "native code"
    remedy = "install a C++17 compiler (apt-get install g++) and install this package again"
    try:
        done = subprocess.run(
            module_argv("lanes", "--version"), env=dict(env), capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
        said = json.loads(done.stdout)
        kernel, missing = said["kernel"], said["missing"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return Check(name, "fail", "`python -m lanes --version` does not work", "install this package again")
    if "error" in kernel:
        return Check(name, "fail", str(kernel["error"]), remedy)
    if missing:
        return Check(name, "fail", str(missing[0]), remedy)
    isa = str(kernel["isa"])
    if isa == "scalar":
        return Check(name, "warn", "scalar code only: no AVX2 here", "experts on the CPU will be slow on this machine")
    return Check(name, "ok", f"built, best instruction set {isa}")


def pack(path: str, env: Mapping[str, str]) -> tuple[Check, dict[str, Any] | None]:
    """Whether it is a pack, and what `inspect` says about it. Its bytes are `verify`'s to read."""
    argv = module_argv("shared_experts", "inspect", "--json", "--", path)
    try:
        done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return Check("pack", "fail", f"{path}: cannot be looked at", "install this package again"), None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        return Check("pack", "fail", reason, "make it again with `expressway pack`"), None
    found = json.loads(done.stdout)
    drafts = ", with a draft layer" if found["experts"].get("draft_layers") else ""
    return Check("pack", "ok", f"{found['name']}, experts {found['experts']['format']}{drafts}"), found


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


def port(name: str, text: str, env: Mapping[str, str], *, asked: bool) -> Check:
    """Whether it could be listened on now. A warning where our own cluster listens, and for a default that is taken."""
    try:
        address = Address.parse(text)
        choose_address(address, remove_stale=False)
    except SetupError as error:
        if (holder := who_listens(text, env)) is not None:
            return Check(name, "warn", f"{text}: cluster {holder!r} listens there", "another cluster needs another one")
        return Check(name, "fail" if asked else "warn", error.message, "choose another with --http, --grpc or --page")
    return Check(name, "ok", f"{address} is free")
