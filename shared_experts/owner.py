"""The region's owner: one process per run directory that adopts or builds the region, then only lends its descriptor.

Not here: the command line (cli_own.py), restarts (the keeper that started it), where owners of several clusters meet
(rendezvous.py).
Invariant: while it lives it alone holds `owner.lock` (the kernel frees it on any death); it never builds a region while
a living lane of the run directory, or the owner or a lane of another cluster of this user, holds a good one of the same
pack; it maps nothing once the region is ready.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from shared_experts import fill
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import RegionBusy, RegionError, SharedExpertsError
from shared_experts.fill import OnStep, SealedRegion, Stopped
from shared_experts.handoff import RegionStatus, ask
from shared_experts.park_disk import ParkDisk
from shared_experts.park_server import SOCKET_NAME as PARK_SOCKET
from shared_experts.park_server import ParkServer, fitting_bytes
from shared_experts.region import GENERATION_BYTES, RegionHeader, RegionShape, check_descriptor
from shared_experts.rendezvous import LANE_SOCKETS, OWNER_SOCKET, Rendezvous

LOCK_NAME = "owner.lock"
SOCKET_NAME = OWNER_SOCKET
HOLDERS_MAX = 256
# A dead lane's socket refuses at once; the limit is for one that lives and is slow, where giving up too early would put
# the experts into memory a second time.
_HOLDER_LIMIT_S = 5.0
_LOCK_POLL_S = 0.2
_PROGRESS_LOG_S = 5.0

_log = structlog.get_logger(__name__)


class Provable(Protocol):
    """What `proof.Proof` does."""

    def before(self, check_stop: Callable[[], None]) -> None:
        """What must be whole before a lane gets the region."""

    def behind(self, pause: Callable[[float], None]) -> None:
        """The rest."""


@dataclass(frozen=True, slots=True)
class OwnerConfig:
    """What the command line decides."""

    run_dir: Path
    experts_path: Path
    shape: RegionShape
    threads: int
    socket_path: Path | None = None  # default: SOCKET_NAME in the run directory
    huge_pages: bool = True
    park_bytes: int | None = 0  # of the pool for parked conversations; 0: none, None: as the host has room
    park_disk: ParkDisk | None = None
    regions_dir: Path | None = None  # where this user's owners meet; None: this owner knows no other cluster
    proof: Provable | None = None  # of what else must be whole


class Owner:
    """`run` does everything; `stop` (from another thread) ends it cleanly."""

    def __init__(self, config: OwnerConfig, *, on_step: OnStep = lambda step, done_bytes: None) -> None:
        self._config = config
        self._on_step = on_step
        self._stop = threading.Event()
        self._fd: int | None = None
        self._damage: SharedExpertsError | None = None
        self._logged_s = time.monotonic()
        self._status = RegionStatus(
            "starting", "", 0, config.shape.total_bytes, config.shape.fingerprint, bytes(GENERATION_BYTES), os.getpid()
        )

    def stop(self) -> None:
        """Ends `run` soon; from another thread, not from a signal handler of the one that runs."""
        self._stop.set()

    def run(self) -> None:
        """Adopts or builds, serves until `stop`, cleans up. Raises a typed error when there is nothing to serve."""
        folder = run_directory(self._config.run_dir)
        lock = take_lock(folder)
        meeting: Rendezvous | None = None
        try:
            meeting = self._meeting_place(folder)
            with contextlib.ExitStack() as stack:
                stack.enter_context(DescriptorServer(self._config.socket_path or folder / SOCKET_NAME, self._answer))
                try:
                    self._meet_and_obtain(folder, meeting)
                    # After the region, which is what huge pages were set aside for.
                    park_bytes = fitting_bytes() if self._config.park_bytes is None else self._config.park_bytes
                    if park_bytes:
                        _log.info("park_pool", bytes=park_bytes)
                        disk = self._config.park_disk
                        stack.enter_context(ParkServer(folder / PARK_SOCKET, park_bytes, disk=disk))
                    self._prove_behind()
                except Stopped:
                    pass
            if self._damage is not None:
                raise self._damage
            _log.info("owner_stopped", generation=self._status.generation.hex())
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if meeting is not None:
                meeting.leave()
            os.close(lock)

    def _answer(self) -> tuple[RegionStatus, int | None]:
        status = self._status  # one read: `_fd` is set before a status that says "ready" is
        return status, self._fd if status.state == "ready" else None

    def _meeting_place(self, folder: Path) -> Rendezvous | None:
        path = self._config.regions_dir
        if path is None:
            return None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            pass  # a file or a link: refused below
        except OSError as error:  # a home that cannot be written to: no other cluster of ours can have made it either
            _log.warning("owner_alone", reason=f"{path}: {error.strerror}")
            return None
        return Rendezvous(run_directory(path), self._config.shape.fingerprint, folder)

    def _meet_and_obtain(self, folder: Path, meeting: Rendezvous | None) -> None:
        """One owner of this pack at a time: who comes second finds what the first has made."""
        self._status = replace(self._status, state="adopting")
        if meeting is None:
            return self._obtain(self._holders([folder]))
        lock = self._wait_for_lock(meeting)
        try:
            meeting.sweep()
            meeting.join()
            self._obtain(self._holders([folder, *meeting.others()]))
        finally:
            os.close(lock)

    def _wait_for_lock(self, meeting: Rendezvous) -> int:
        waiting = False
        while (lock := meeting.try_lock()) is None:
            self._check_stop()
            if not waiting:
                _log.info("owner_waits", reason="another cluster's owner prepares the region of this pack")
            waiting = True
            for other in meeting.others():
                with contextlib.suppress(RegionError):  # its progress is ours
                    status, _ = ask(other / OWNER_SOCKET, "status", timeout_s=_LOCK_POLL_S)
                    if status.state != "ready":
                        done_bytes = min(status.done_bytes, self._status.total_bytes)
                        self._status = replace(self._status, done_bytes=done_bytes)
            self._stop.wait(_LOCK_POLL_S)
        self._status = replace(self._status, done_bytes=0)
        return lock

    def _holders(self, run_dirs: list[Path]) -> list[Path]:
        """Sockets of all who may hold the region, our own lanes first."""
        own, *others = run_dirs
        found = sorted(own.glob(LANE_SOCKETS))[:HOLDERS_MAX]
        for other in others:
            found += [other / OWNER_SOCKET, *sorted(other.glob(LANE_SOCKETS))[:HOLDERS_MAX]]
        return found

    def _obtain(self, holders: list[Path]) -> None:
        began_s = time.monotonic()
        region, source = self._adopt(holders), "adopted"
        if region is None:
            began_s = time.monotonic()
            self._status = replace(self._status, state="filling", done_bytes=0)
            region, source = self._build(), "built"
        seconds = time.monotonic() - began_s
        total = region.header.total_bytes
        self._fd = region.fd
        self._status = replace(
            self._status, state="ready", source=source, done_bytes=total, generation=region.header.generation
        )
        _log.info(
            "owner_ready",
            generation=region.header.generation.hex(),
            source=source,
            adopted=source == "adopted",
            bytes=total,
            seconds=round(seconds, 3),
            gb_per_s=round(total / 1e9 / max(seconds, 1e-9), 2),
            page_bytes=region.page_bytes,
            layers=region.header.layers,
            threads=self._config.threads,
            pid=os.getpid(),
        )

    def _build(self) -> SealedRegion:
        """Fills; beside it, in a thread of its own, what lanes will read of the pack themselves is proven."""
        config, given_up = self._config, threading.Event()
        _log.info("owner_filling", bytes=config.shape.total_bytes, threads=config.threads)

        def check_stop() -> None:
            if given_up.is_set():
                raise Stopped
            self._check_stop()

        with ThreadPoolExecutor(1, thread_name_prefix="pack-proof") as pool:
            proof = pool.submit(config.proof.before, check_stop) if config.proof else None

            def step(at: str, done_bytes: int) -> None:
                if proof is not None and proof.done():
                    proof.result()  # what is damaged is not filled to its end first
                self._step(at, done_bytes)

            try:
                region = fill.build(
                    config.experts_path,
                    config.shape,
                    threads=config.threads,
                    on_step=step,
                    huge_pages=config.huge_pages,
                )
            except BaseException:
                given_up.set()
                raise
            try:
                if proof is not None:
                    proof.result()
            except BaseException:
                os.close(region.fd)
                raise
        return region

    def _prove_behind(self) -> None:
        """Until `stop`. A pack that turns out to be damaged ends this owner."""
        proof, began_s = self._config.proof, time.monotonic()
        if proof is not None:
            try:
                proof.behind(self._pause)
            except SharedExpertsError as error:
                self._damage = error
                return
            _log.info("pack_proven", seconds=round(time.monotonic() - began_s, 3))
        self._stop.wait()

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    def _adopt(self, holders: list[Path]) -> SealedRegion | None:
        """The region that a living process holds, proven byte for byte; None when there is none."""
        for path in holders:
            self._check_stop()
            try:
                status, fd = ask(path, "descriptor", timeout_s=_HOLDER_LIMIT_S)
            except RegionError as error:
                _log.info("holder_skipped", holder=_name(path), reason=str(error))
                continue
            if fd is None:
                _log.info("holder_skipped", holder=_name(path), reason="it has no region")
                continue
            try:
                header = self._prove(fd, status)
                if (
                    self._config.proof is not None
                ):  # again, in our own run directory too: lanes that start read the pack
                    self._config.proof.before(self._check_stop)
            except (RegionError, OSError) as error:
                os.close(fd)
                _log.warning("holder_skipped", holder=_name(path), reason=str(error))
                continue
            except BaseException:
                os.close(fd)
                raise
            _log.info("region_adopted", holder=_name(path), holder_pid=status.pid)
            return SealedRegion(fd, header, os.fstatvfs(fd).f_bsize)
        return None

    def _prove(self, fd: int, status: RegionStatus) -> RegionHeader:
        header = check_descriptor(fd, self._config.shape, generation=status.generation)
        fill.verify(fd, self._config.shape, threads=self._config.threads, on_step=self._step)
        return header

    def _step(self, step: str, done_bytes: int) -> None:
        self._check_stop()
        self._on_step(step, done_bytes)
        self._status = replace(self._status, done_bytes=min(done_bytes, self._config.shape.total_bytes))
        if step == "filling" and time.monotonic() - self._logged_s >= _PROGRESS_LOG_S:
            self._logged_s = time.monotonic()
            _log.info("owner_progress", state=self._status.state, bytes=done_bytes)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped


def _name(holder: Path) -> str:
    return f"{holder.parent.name}/{holder.name}"


def take_lock(folder: Path) -> int:
    """The run directory's owner lock, held as long as the returned descriptor is open; raises RegionBusy."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise RegionBusy(f"{folder / LOCK_NAME}: another owner serves this run directory") from error
    return fd


def run_directory(path: str | os.PathLike[str]) -> Path:
    """Makes or checks the run directory: ours, 0700, no link; raises RegionError otherwise."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise RegionError(f"{folder}: cannot be the run directory: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise RegionError(f"{folder}: the run directory must be a directory of ours with mode 0700")
    return folder
