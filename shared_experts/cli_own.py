"""`python -m shared_experts own`: the region owner as a process.

Logs go to stderr, one event per line; `owner_ready` says that lanes can attach. Exit code 0 after SIGTERM or SIGINT,
whatever state it was in; typed errors are the dispatcher's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, cast

import click
import structlog

from shared_experts import limits
from shared_experts.damage import RECORD, DamageRecord
from shared_experts.errors import SharedExpertsError
from shared_experts.log_lines import LossyLines
from shared_experts.owner import Owner, OwnerConfig
from shared_experts.pack import Pack
from shared_experts.park_disk import ParkDisk
from shared_experts.proof import Proof
from shared_experts.region import RegionShape

_PR_SET_PDEATHSIG = 1
_DEFAULT_THREADS_MAX = 16  # beyond this a fill is bound by page clearing, not by threads


class _Park(click.IntRange):
    """None for "auto"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click calls it."""
        return None if value == "auto" else super().convert(value, param, ctx)


@click.command(short_help="Hold a pack's expert region and lend it to lanes.")
@click.option("--pack", "pack_dir", required=True, type=click.Path(path_type=Path), help="The pack's directory.")
@click.option(
    "--run-dir", required=True, type=click.Path(path_type=Path), help="Lock and sockets; made with mode 0700."
)
@click.option(
    "--socket", "socket_path", type=click.Path(path_type=Path), help="Default: owner.sock in the run directory."
)
@click.option(
    "--regions", type=click.Path(path_type=Path), help="Where owners of other clusters are met, to share one region."
)
@click.option("--threads", type=click.IntRange(1, 256), help="Fill threads. Default: this process's cores, at most 16.")
@click.option(
    "--park",
    "park_bytes",
    type=_Park(0, limits.PARK_POOL_BYTES),
    default=0,
    show_default=True,
    metavar="BYTES",
    help="Size of the pool for conversations that left a lane's memory; auto: as the host has room, 0: none.",
)
@click.option("--park-disk", "park_dir", type=click.Path(path_type=Path), help="Keeps parked conversations there, too.")
@click.option(
    "--park-disk-bytes",
    type=click.IntRange(0, limits.PARK_POOL_BYTES),
    default=0,
    show_default=True,
    metavar="BYTES",
    help="What it may hold; the oldest go first.",
)
@click.option("--log-json", is_flag=True, help="One JSON object per line instead of readable text.")
@click.option("--die-with-parent", is_flag=True, help="SIGTERM when the process that started this one dies.")
def own(
    pack_dir: Path,
    run_dir: Path,
    socket_path: Path | None,
    regions: Path | None,
    threads: int | None,
    park_bytes: int | None,
    park_dir: Path | None,
    park_disk_bytes: int,
    log_json: bool,
    die_with_parent: bool,
) -> int:
    """Hold the shared expert region of a pack and lend it to lanes until told to stop."""
    configure_log(json=log_json)
    log = structlog.get_logger("shared_experts.own")
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash never writes the experts to a disk
    if die_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        with Pack.open(pack_dir) as pack:  # the fill opens its file itself and trusts digests only
            experts_path, shape = Path(pack.experts_path), RegionShape.of(pack.manifest)
        threads = threads or min(_DEFAULT_THREADS_MAX, len(os.sched_getaffinity(0)))
        disk = ParkDisk(park_dir, shape.fingerprint, park_disk_bytes) if park_dir and park_disk_bytes else None
        owner = Owner(
            OwnerConfig(
                run_dir,
                experts_path,
                shape,
                threads,
                socket_path,
                park_bytes=park_bytes,
                park_disk=disk,
                regions_dir=regions,
                proof=Proof(pack_dir, shape.fingerprint, found=DamageRecord(run_dir / RECORD, shape.fingerprint)),
            )
        )
        _stop_on_signals(owner)
        log.info("owner_starting", pack=str(pack_dir), run_dir=str(run_dir), pid=os.getpid())
        owner.run()
    except SharedExpertsError as error:
        log.error("owner_failed", code=error.code, retryable=error.retryable, reason=str(error))
        raise
    return 0


def _stop_on_signals(owner: Owner) -> None:
    """`stop` runs in a thread of its own: a handler runs in the midst of whatever the main thread does, also while that
    holds the lock of the event that `stop` sets."""
    heard, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(tell, b"."))

    def wait() -> None:
        while os.read(heard, 1):
            owner.stop()

    threading.Thread(target=wait, name="signals", daemon=True).start()


def configure_log(*, json: bool) -> None:
    """Sends structlog's events to stderr, as JSON or readable, with level and time."""
    renderer = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.dict_tracebacks] if json else []),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyLines(sys.stderr))),
        cache_logger_on_first_use=True,
    )
