"""The run directory of a cluster on this host: sockets, the lock, and `cluster.json`; gone when the cluster is.

    $XDG_RUNTIME_DIR/expressway/<cluster>/      0700  (else $XDG_STATE_HOME/expressway/<cluster>/run/)
        lock               flock held by the supervisor for as long as it lives: a directory whose lock is free is stale
        supervisor.sock    coordinator -> supervisor            0600
        owner.sock         lanes -> owner                       0600
        lane-<k>.sock      coordinator -> lane k                0600
        lane-<k>.region.sock   a new owner -> lane k            0600
        cluster.json       addresses, pids, ready or not        0600
    $XDG_RUNTIME_DIR/expressway/.regions/       0700  (else $XDG_STATE_HOME/expressway/.regions/) where owners meet
    $XDG_STATE_HOME/expressway/<cluster>/log/<process>.log      0700/0600, survives the cluster

Not here: what is said over the sockets, what owners leave in `.regions` (theirs), which clusters run (clusters.py).
Invariant: every directory of ours belongs to this user, is no symbolic link,
and is closed to everybody else; a `RunDir` obtained from `claim` is held by this process alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import RunDirBusy, RunDirError

SOCKET_PATH_LIMIT_BYTES = 107  # sun_path holds 108 bytes with its final zero
LONGEST_SOCKET_NAME = "lane-255.region.sock"
_CLUSTER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_CLUSTER_FILE_LIMIT_BYTES = 1 << 20
_REGIONS = ".regions"
_BUSY_TRIES, _BUSY_PAUSE_S = 5, 0.05  # somebody who only looks whether a cluster runs holds the lock for a moment


def state_dir(cluster: str, env: Mapping[str, str] = os.environ) -> Path:
    """Where the cluster keeps what outlives it. Not created here."""
    return _xdg(env, "XDG_STATE_HOME", Path(env.get("HOME") or "/") / ".local" / "state") / check_name(cluster)


def run_path(cluster: str, env: Mapping[str, str] = os.environ) -> Path:
    """Where the cluster's run directory is or would be. Not created here."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):  # relative values are to be ignored, says the XDG specification
        return Path(runtime) / "expressway" / check_name(cluster)
    return state_dir(cluster, env) / "run"


def regions_path(env: Mapping[str, str] = os.environ) -> Path:
    """Where the owners of all clusters meet; no cluster can have its name. Not created here."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "expressway" / _REGIONS
    return _xdg(env, "XDG_STATE_HOME", Path(env.get("HOME") or "/") / ".local" / "state") / _REGIONS


class RunDir:
    """A run directory that this process holds. Use `claim`, and `release` at the end."""

    def __init__(self, path: Path, log_dir: Path, lock_fd: int) -> None:
        self.path, self.log_dir, self._lock_fd = path, log_dir, lock_fd

    @classmethod
    def claim(cls, cluster: str, env: Mapping[str, str] = os.environ) -> RunDir:
        """Create the directories, take the lock and clear what a dead predecessor left.

        RunDirBusy when a live supervisor holds it, RunDirError when the directory is not safe or its path too long.
        """
        path = run_path(cluster, env)
        check_socket_path(path / LONGEST_SOCKET_NAME)
        log_dir = state_dir(cluster, env) / "log"
        for directory in (path, log_dir):
            _make_private(directory, below="expressway")
        lock_fd = _lock_patiently(path / "lock")
        if lock_fd is None:
            raise RunDirBusy(
                f"{path}: cluster {cluster!r} is already running here; another name (--cluster) makes another cluster"
            )
        run_dir = cls(path, log_dir, lock_fd)
        run_dir._clear()
        return run_dir

    @classmethod
    def temporary(cls, env: Mapping[str, str] = os.environ) -> RunDir:
        """A run directory of no cluster, with a name of its own, for processes that live as long as one command."""
        runtime = env.get("XDG_RUNTIME_DIR", "")
        parent = runtime if runtime.startswith("/") and os.access(runtime, os.W_OK) else None
        check_socket_path(Path(parent or tempfile.gettempdir()) / "expressway-12345678" / LONGEST_SOCKET_NAME)
        path = Path(tempfile.mkdtemp(prefix="expressway-", dir=parent))  # 0700
        (path / "log").mkdir(mode=0o700)
        lock_fd = _lock(path / "lock")
        assert lock_fd is not None, "nobody else knows the name"
        return cls(path, path / "log", lock_fd)

    def socket(self, name: str) -> Path:
        """Path of the socket `<name>.sock`, short enough to be bound."""
        return check_socket_path(self.path / f"{name}.sock")

    def log(self, name: str) -> Path:
        """Path of the log file of process `name`."""
        return self.log_dir / f"{name}.log"

    def write_cluster(self, content: Mapping[str, object]) -> None:
        """Write `cluster.json` in one step: readers see the old file or the new one. RunDirError when it cannot be."""
        draft = self.path / "cluster.json.new"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(draft, self.path / "cluster.json")
        except OSError as error:
            raise RunDirError(f"{self.path}: cluster.json cannot be written: {error.strerror}") from None

    def release(self) -> None:
        """Empty the directory, remove it where that is possible, and give up the lock.

        A directory that somebody else removed, and maybe holds by now, is left alone.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / "lock", follow_symlinks=False), os.fstat(self._lock_fd)):
                self._clear()
                (self.path / "lock").unlink()
                self.path.rmdir()
        os.close(self._lock_fd)

    def _clear(self) -> None:
        for entry in os.scandir(self.path):
            if entry.name == "lock":
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def read_cluster(cluster: str, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The `cluster.json` of a running cluster; RunDirError when none runs, or the file is not to be trusted."""
    path = run_path(cluster, env) / "cluster.json"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RunDirError(f"cluster {cluster!r} does not run here, or is not ready yet (no {path})") from None
    except OSError as error:
        raise RunDirError(f"{path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise RunDirError(f"{path}: belongs to another user or is open to others")
        raw = file.read(_CLUSTER_FILE_LIMIT_BYTES + 1)
    try:
        if len(raw) > _CLUSTER_FILE_LIMIT_BYTES:
            raise ValueError("too long")
        content = json.loads(raw)
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise RunDirError(f"{path}: {error}") from None
    if not is_running(cluster, env):
        raise RunDirError(f"cluster {cluster!r} does not run here any more: it was killed (the next one clears {path})")
    return content


def is_running(cluster: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether a living supervisor holds this cluster's run directory."""
    try:
        fd = os.open(run_path(cluster, env) / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock_patiently(path: Path) -> int | None:
    for _ in range(_BUSY_TRIES - 1):
        fd = _lock(path)
        if fd is not None:
            return fd
        time.sleep(_BUSY_PAUSE_S)
    return _lock(path)


def _lock(path: Path) -> int | None:
    """Descriptor of the lock file, held; None when somebody else holds it."""
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)  # a predecessor's release may just have removed it
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # A predecessor removes its lock file while it holds the lock: one that was opened before that locks nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def check_socket_path(path: Path) -> Path:
    """The same path, or RunDirError when a Unix socket cannot have it."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_LIMIT_BYTES:
        raise RunDirError(
            f"{path}: {length} bytes, but the path of a Unix socket has at most {SOCKET_PATH_LIMIT_BYTES}; "
            "set XDG_RUNTIME_DIR to a shorter directory or choose a shorter cluster name"
        )
    return path


def check_name(cluster: str) -> str:
    """The name, if a cluster may have it."""
    if not _CLUSTER_NAME.fullmatch(cluster):
        raise RunDirError(f"cluster name {cluster!r}: 1 to 32 of a-z, 0-9 and '-', not starting with '-'")
    return cluster


def _xdg(env: Mapping[str, str], variable: str, default: Path) -> Path:
    value = env.get(variable, "")
    return (Path(value) if value.startswith("/") else default) / "expressway"


def check_private(directory: Path, *, below: str) -> None:
    """RunDirError unless `directory` and its parents down from the one named `below` are ours alone."""
    for path in _ours(directory, below):
        _check_one(path)


def _make_private(directory: Path, *, below: str) -> None:
    """Create `directory`; it and its parents down from the one named `below` must be ours alone."""
    ours = _ours(directory, below)
    ours[0].parent.mkdir(parents=True, exist_ok=True)
    for path in ours:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_one(path)


def _ours(directory: Path, below: str) -> list[Path]:
    chain = [directory, *directory.parents]
    return chain[[parent.name for parent in chain].index(below) :: -1]


def _check_one(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise RunDirError(f"{path}: not a directory")
    if found.st_uid != os.geteuid():
        raise RunDirError(f"{path}: belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise RunDirError(f"{path}: open to others (mode {stat.S_IMODE(found.st_mode):o}); chmod 700 it")
