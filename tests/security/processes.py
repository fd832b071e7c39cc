"""What the kernel says of processes: their sockets, files and maps. From /proc alone."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class InetSocket:
    """One TCP or UDP socket."""

    kind: str  # "tcp", "tcp6", "udp", "udp6"
    local: str
    remote: str
    state: str  # hexadecimal, as the kernel writes it


def descendants(pids: Iterable[int]) -> set[int]:
    """These processes and all that they started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def inet_sockets(pid: int) -> Iterator[InetSocket]:
    """The network sockets that a process holds."""
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in open_files(pid) if "socket:[" in link}
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                yield InetSocket(kind, _address(fields[1]), _address(fields[2]), fields[3])


def open_files(pid: int) -> list[str]:
    """Where its descriptors point."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return links


def is_loopback(address: str) -> bool:
    """Whether an address stays on this host."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def _address(field: str) -> str:
    """`0100007F:1F90` is 127.0.0.1: words of four bytes, each little-endian."""
    raw = bytes.fromhex(field.partition(":")[0])
    words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(words)))
