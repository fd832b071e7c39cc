"""Doctor's look at Ray: version, what the environment says to it, and whether another Ray may kill our processes.

Not here: starting Ray (launchers.ray), which brings an environment of its own. Invariant: values of variables are never
shown, they may be secrets.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from coordinator.cli.doctor_checks import Check
from coordinator.launchers.ray import LOWEST_VERSION
from coordinator.launchers.ray_warden import PREFIX

MONITOR = "RAY_memory_monitor_refresh_ms"


def ray_version(installed: str | None) -> Check:
    """Old versions have holes; without Ray there is `--launcher local`."""
    name, lowest = "Ray", ".".join(map(str, LOWEST_VERSION))
    if installed is None:
        return Check(name, "ok", "not installed; --launcher local needs none")
    if tuple(int(part) for part in installed.split(".")[:3] if part.isdigit()) < LOWEST_VERSION:
        return Check(name, "warn", f"{installed} has known security holes", f"pip install 'ray>={lowest}'")
    return Check(name, "ok", f"{installed}; --launcher ray runs it on loopback, with a token, its memory monitor off")


def installed_ray() -> str | None:
    """The version, None without Ray."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def ray_environment(env: Mapping[str, str]) -> Check:
    """`--launcher ray` starts a Ray of its own and ignores these, which may surprise."""
    name = "Ray environment"
    found = sorted(key for key in env if key.startswith("RAY_"))
    if not found:
        return Check(name, "ok", "nothing set in the environment")
    remedy = "unset them if you expected them to matter: address, token and memory monitor are set by the launcher"
    return Check(name, "warn", f"{', '.join(found)} set, and ignored by --launcher ray", remedy)


def other_rays(command_lines: Iterable[str]) -> Check:
    """A Ray that is not ours watches all memory of the host, and a region is a lot of memory."""
    name = "other Ray"
    others = sum("raylet" in line.split(" ", 1)[0] and PREFIX not in line for line in command_lines)
    if not others:
        return Check(name, "ok", "none runs on this host")
    return Check(
        name,
        "warn",
        f"{others} running; a memory monitor counts the shared region and may kill that Ray's own workers",
        f"start that Ray with {MONITOR}=0, or leave room for the region below its threshold",
    )


def command_lines(proc: Path = Path("/proc")) -> Iterable[str]:
    """Of every process that can be seen."""
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has just ended, or is not for us to see
