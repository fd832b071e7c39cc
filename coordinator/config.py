"""What `serve` and `python -m coordinator` were asked for, parsed and checked once; frozen from then on.

Not here: defaults of requests (limits), where sockets lie (rundir). Invariant: a `ServeConfig` has passed every check
that needs no process: addresses are local and free at the time, the pack is there, the numbers are in range.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.errors import BadAddress, BadOption, BadPack
from coordinator.host.lane_options import LaneOptions
from coordinator.host.rundir import check_socket_path
from coordinator.pack_facts import PackFacts
from coordinator.pack_file import MANIFEST
from coordinator.tls import Tls

LANES_MAX = 256
# What a lane takes for its own options of the same names; a test compares them.
CONTEXT_MIN, CONTEXT_MAX = 2, 1 << 20
PREFILL_CHUNK_MAX = 8192
SIZE_MAX_BYTES = 1 << 40
DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"
DEFAULT_PAGE = "127.0.0.1:8002"
NO_PAGE = "off"
AUTO = "auto"
PARK_AUTO = -1  # bytes of the park pool that its owner finds once the region is there
PARK_MIN_BYTES = 1 << 20  # a few of the pool's pieces: less holds nothing, and nothing would say so
# A CPU lane's cache is a private copy of experts in host memory, beside the shared region: keep it modest.
DEFAULT_CPU_BUDGET = "256MiB"
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,3}))?\s*([KMG]i?B|B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a door listens: a loopback host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, anywhere: bool = False) -> Address:
        """From HOST:PORT, [HOST]:PORT or unix:PATH. Port 0 lets the kernel choose. BadAddress says what is wrong."""
        if text.startswith("unix:"):
            path = Path(text.removeprefix("unix:"))
            if not path.is_absolute():
                raise BadAddress(f"{text}: the path of a Unix socket must be absolute")
            return cls(path=str(check_socket_path(path)))
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise BadAddress(f"{text!r}: expected HOST:PORT or unix:PATH")
        host = host.removeprefix("[").removesuffix("]")
        if host != "localhost":
            try:
                loopback = ipaddress.ip_address(host).is_loopback
            except ValueError:
                raise BadAddress(f"{text!r}: {host!r} is neither an IP address nor 'localhost'") from None
            if not loopback and not anywhere:
                raise BadAddress(
                    f"{text}: refused, because anybody who reaches it could use the server: this door has no keys "
                    "and no TLS yet. Listen on 127.0.0.1 and forward from there (ssh -L, or a proxy that "
                    "authenticates)"
                )
        return cls(host="127.0.0.1" if host == "localhost" else host, port=int(port))

    @property
    def local(self) -> bool:
        """Whether only this host can reach it."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HostDoor:
    """Where other hosts join, and the coordinator's own certificate: without one there is no such door."""

    address: Address
    identity: Path  # checked by whoever opens the door
    alike: Mapping[str, str] = field(default_factory=dict)  # options that all hosts' lanes must have


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `expressway serve` was asked for."""

    lane: LaneOptions
    cluster: str
    lanes: int
    launcher: str
    http: Address
    grpc: Address
    page: Address | None
    cores_per_lane: int | None
    drain_s: float
    start_timeout_s: float
    park_bytes: int = 0  # of the host's pool for parked conversations, or PARK_AUTO
    trace_requests: Path | None = None  # a directory for traces of requests
    otlp: str | None = None  # a collector of spans
    park_disk_bytes: int = 0  # of their copies in the state directory
    tenants: Path | None = None  # the file of keys; it need not be there
    tls: Tls | None = None  # of both doors
    hosts: HostDoor | None = None  # where other hosts join
    facts: PackFacts | None = None  # what a lane that is added is counted by


def default_tenants(env: Mapping[str, str]) -> Path:
    """The file of keys that is taken when it is there and none was named."""
    base = env.get("XDG_CONFIG_HOME", "")
    root = Path(base) if base.startswith("/") else Path(env.get("HOME") or "/") / ".config"
    return root / "expressway" / "tenants.json"


def default_identities(env: Mapping[str, str]) -> Path:
    """The folder of the cluster's authority and its hosts' certificates."""
    return default_tenants(env).parent / "hosts"


def named_tenants(path: Path | None, env: Mapping[str, str]) -> Path:
    """The file of keys to look at: one that was named must be there. BadOption when it is not."""
    if path is not None and not path.is_file():
        raise BadOption(f"--tenants {path}: no such file; `expressway keys add NAME --tenants FILE` makes one")
    return (path or default_tenants(env)).absolute()


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Everything `python -m coordinator` was asked for."""

    supervisor: str  # gRPC target of the supervisor's socket
    pack: Path  # for its tokenizer files
    http: Address
    grpc: Address
    drain_s: float
    page: Address | None = None
    owner_socket: Path | None = None  # of the region's owner
    trace_requests: Path | None = None  # a directory
    otlp: str | None = None  # a collector of spans
    tenants: Path | None = None  # the file of keys; it need not be there
    tls: Tls | None = None  # of both doors
    hosts: HostDoor | None = None  # where other hosts join

    @property
    def run_dir(self) -> Path:
        """Where the supervisor's socket lies, and this process's own files."""
        return Path(self.supervisor.removeprefix("unix:")).parent


def parse_door(text: str) -> Address:
    """Where a door listens that may have keys and TLS: as `Address.parse`, any IP address."""
    return Address.parse(text, anywhere=True)


def check_reach(address: Address, *, keys: bool, tls: bool) -> None:
    """BadAddress for an address that others can reach, unless the door has keys and TLS."""
    if not address.local and not (keys and tls):
        raise BadAddress(
            f"{address}: refused, because anybody who reaches it could use the server or listen: it has no keys and no "
            "TLS, or only one of them (`expressway keys add`, --tls-cert, --tls-key)"
        )


def parse_http(text: str) -> Address:
    """Where the HTTP door listens: HOST:PORT."""
    address = parse_door(text)
    if address.path:
        raise BadAddress(f"{text}: --http takes HOST:PORT; a Unix socket is for --grpc")
    return address


def parse_host_door(text: str) -> Address:
    """Where hosts meet: HOST:PORT, any IP address, because both ends show a certificate."""
    address = parse_door(text)
    if address.path:
        raise BadAddress(f"{text}: expected HOST:PORT")
    return address


def parse_page(text: str) -> Address | None:
    """Where the page listens: HOST:PORT, or None for "off"."""
    if text == NO_PAGE:
        return None
    address = Address.parse(text)
    if address.path:
        raise BadAddress(f"{text}: --page takes HOST:PORT or {NO_PAGE}")
    return address


def parse_size(text: str) -> int:
    """Bytes, from "2GiB", "1.5GB", "300000", at most 1024GiB. BadOption says what is wrong."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadOption(f"{text!r}: expected a size such as 512MiB, 2GiB or 2000000000")
    whole, fraction, unit = match.groups()
    scale = _UNITS[(unit or "").upper()]
    size = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    if size > SIZE_MAX_BYTES:
        raise BadOption(f"{text!r}: more than 1024GiB")
    return size


def parse_park(text: str) -> int:
    """As `parse_size`; PARK_AUTO for "auto". BadOption for a pool that would hold nothing."""
    if text.strip() == AUTO:
        return PARK_AUTO
    size = parse_size(text)
    if 0 < size < PARK_MIN_BYTES:
        raise BadOption(f"{text!r}: expected {AUTO}, 0 or at least 1MiB")
    return size


def check_park(park_bytes: int, disk_bytes: int) -> None:
    """BadOption for files of a pool that is not there."""
    if disk_bytes and not park_bytes:
        raise BadOption("--park-disk: keeps what is in the park pool, and --park 0 makes none")


def check_pack(pack: Path) -> Path:
    """The pack's absolute path, if there is something that looks like one. BadPack says what is there instead."""
    if not pack.exists():
        raise BadPack(f"{pack}: no such directory")
    if not pack.is_dir():
        raise BadPack(f"{pack}: is a file; a pack is a directory")
    if not (pack / MANIFEST).is_file():
        raise BadPack(f"{pack}: no {MANIFEST} in it; make a pack with `expressway pack`")
    return pack.resolve()


def lane_budget(device: str, asked_bytes: int | None) -> int:
    """A lane's --vram-budget. BadOption on a GPU, all of whose memory for a lane it is, where none is said."""
    if asked_bytes is None and device == "cuda":
        raise BadOption("--vram-budget: say how much memory of its GPU a lane may take in all, such as 16GiB")
    return parse_size(DEFAULT_CPU_BUDGET) if asked_bytes is None else asked_bytes


def choose_address(address: Address, *, remove_stale: bool = True) -> Address:
    """The same address, with a port in place of 0; BadAddress when somebody listens there already.

    A moment passes between this check and the door that really listens: what it saves is starting everything for
    nothing.
    """
    if address.path:
        _check_unix(Path(address.path), remove_stale)
        return address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as error:
            raise BadAddress(f"{address}: cannot listen there: {error.strerror}") from None
        return replace(address, port=probe.getsockname()[1])


def _check_unix(path: Path, remove_stale: bool) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise BadAddress(f"unix:{path}: no directory {path.parent}") from None
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise BadAddress(f"unix:{path}: there is something else that is not our socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if remove_stale:  # nobody listens: left by a server that was killed
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            return
        except OSError as error:
            raise BadAddress(f"unix:{path}: {error.strerror}") from None
    raise BadAddress(f"unix:{path}: somebody else listens there")
