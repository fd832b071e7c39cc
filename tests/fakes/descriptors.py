"""Which files and threads this process holds, by name: a test's own, whatever other tests left to end in it."""

import os
import time
from pathlib import Path


def held(name: str | Path) -> list[str]:
    """What this process's open descriptors lead to where `name` is part of it: paths, memory files' labels."""
    return sorted(target for number in os.listdir("/proc/self/fd") if str(name) in (target := _target(number)))


def hand_off_sockets() -> list[str]:
    """This process's ends of sequenced-packet sockets, which nothing but the hand-off of regions uses."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    inodes = {fields[6] for fields in map(str.split, lines) if fields[4] == "0005"}  # SOCK_SEQPACKET
    return [target for target in held("socket:[") if target.removeprefix("socket:[").removesuffix("]") in inodes]


def threads(name: str, expected: int | None = None) -> int:
    """How many threads of this process have this name (at most 15 characters).

    The kernel lists a thread for a moment after it was joined, so an `expected` number is waited for.
    """
    until_s = time.monotonic() + 60.0
    while (count := _threads(name)) != (count if expected is None else expected) and time.monotonic() < until_s:
        time.sleep(0.001)
    return count


def _threads(name: str) -> int:
    return sum(_name(task) == name for task in Path("/proc/self/task").iterdir())


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # closed since it was listed
        return ""


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().rstrip("\n")
    except OSError:  # ended since it was listed
        return ""
