"""What processes leave behind on the host, by a folder that all of them have in their command line or paths."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

# Ours, and what Python, torch and its OpenMP libraries could make for us.
SHARED_MEMORY_PREFIXES = ("expressway", "exw", "psm_", "sem.", "torch_", "__KMP", "ray")


@dataclass(frozen=True, slots=True)
class Remains:
    """Everything that still mentions the folder; two snapshots of a quiet folder are equal."""

    processes: tuple[str, ...]  # command lines
    sockets: tuple[str, ...]  # paths of Unix sockets that somebody holds
    files: tuple[str, ...]  # below the folder
    shared_memory: tuple[str, ...]  # names in /dev/shm that no living process has mapped and that could be ours


@dataclass(frozen=True, slots=True)
class Holding:
    """What one living process holds."""

    descriptors: int
    threads: int
    private_bytes: int  # anonymous memory that is resident


def remains(folder: Path) -> Remains:
    """Looks at the host now."""
    text = str(folder)
    return Remains(
        tuple(sorted(line for line in _command_lines() if text in line)),
        tuple(sorted(line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if text in line)),
        tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))),
        _forgotten_shared_memory(),
    )


def holding(pid: int) -> Holding:
    """Looks at a living process now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Holding(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["RssAnon"].split()[0]) << 10)


def slope(values: list[int]) -> float:
    """Growth per step: the least-squares line through the values."""
    if len(values) < 2:
        return 0.0
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    above = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(len(values)))


def _forgotten_shared_memory() -> tuple[str, ...]:
    """What other programs on this host use is not ours; what nobody uses was left behind."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(SHARED_MEMORY_PREFIXES)]
    if not names:
        return ()
    used = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                used |= {
                    line.rsplit("/", 1)[-1] for line in (entry / "maps").read_text().split() if "/dev/shm/" in line
                }
    return tuple(sorted(name for name in names if name not in used and Path("/dev/shm", name).exists()))


def _command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
            except OSError:
                continue  # it has just ended
    return lines
