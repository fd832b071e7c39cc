"""`expressway serve`: brings a cluster up on this host and keeps it until it is told to stop.

Not here: the cluster itself (cluster.py). Invariant: with `--ready-json` stdout carries exactly one line,
whether it becomes ready or fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from coordinator.cli import host_options
from coordinator.cli.lane_options import collect, lane_options
from coordinator.cli.progress import Progress
from coordinator.cli.values import GRPC, HOSTS_AT, HTTP, PAGE, PARK, SIZE, Parsed
from coordinator.config import (
    AUTO,
    DEFAULT_GRPC,
    DEFAULT_HTTP,
    DEFAULT_PAGE,
    Address,
    HostDoor,
    ServeConfig,
    check_pack,
    check_park,
    check_reach,
    default_identities,
    lane_budget,
    named_tenants,
)
from coordinator.errors import BadAddress
from coordinator.host.cluster import Running, run_cluster
from coordinator.host.identity import Identity
from coordinator.host.room import check_room, free_here
from coordinator.logs import configure_logging
from coordinator.pack_facts import read_facts
from coordinator.telemetry.spans import check_otlp
from coordinator.tls import named_tls


@click.command(short_help="Serve PACK on this host until Ctrl-C.")
@click.argument("pack", type=click.Path(path_type=Path))
@host_options.lanes
@lane_options
@click.option("--park", "park_bytes", type=PARK, default=AUTO, show_default=True, metavar="SIZE",
              help="Host memory for conversations that left a lane's; any lane takes them back. auto: an eighth of "
                   "what is free beside the region, at least 1GiB. 0: none.")  # fmt: skip
@click.option("--park-disk", "park_disk_bytes", type=SIZE, default="0", show_default=True, metavar="SIZE",
              help="Keeps them in the state directory, too, so that they survive restarts. 0: no.")  # fmt: skip
@click.option("--tenants", type=click.Path(path_type=Path), metavar="FILE",
              help="Keys, made by `expressway keys`. Default: ~/.config/expressway/tenants.json, if any.")  # fmt: skip
@click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="PEM, of both doors.")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE",
              help="PEM. With keys and TLS, the doors may listen anywhere.")  # fmt: skip
@click.option("--join-at", type=HOSTS_AT, metavar="HOST:PORT",
              help="Other hosts join there (`expressway cluster`); both ends show certificates.")  # fmt: skip
@click.option("--identity", type=click.Path(path_type=Path), metavar="FILE",
              help="This host's certificate for them. Default: ~/.config/expressway/hosts/head.pem.")  # fmt: skip
@click.option("--launcher", type=click.Choice(["local", "ray"]), default="local", show_default=True)
@click.option(
    "--http", type=HTTP, default=DEFAULT_HTTP, show_default=True, metavar="HOST:PORT", help="Port 0: a free one."
)
@click.option("--grpc", type=GRPC, default=DEFAULT_GRPC, show_default=True, metavar="HOST:PORT|unix:PATH")
@click.option("--page", type=PAGE, default=DEFAULT_PAGE, show_default=True, metavar="HOST:PORT|off",
              help="The live page and /metrics.")  # fmt: skip
@host_options.cluster
@host_options.cores_per_lane
@click.option("--drain", "drain_s", type=click.FloatRange(0, 3600), default=10.0, show_default=True, metavar="SECONDS",
              help="How long running answers may go on when told to stop.")  # fmt: skip
@click.option("--trace-requests", metavar="DIR",
              type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True, resolve_path=True),
              help="A line there for every request that ends: times and counts, never text.")  # fmt: skip
@click.option("--otlp", metavar="URL", type=Parsed("url", check_otlp),
              help="Send a span of every request to the OpenTelemetry collector at http://HOST:PORT.")  # fmt: skip
@host_options.start_timeout
@host_options.log_json
@host_options.ready_json
def command(
    pack: Path,
    lanes: int,
    park_bytes: int,
    park_disk_bytes: int,
    tenants: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    join_at: Address | None,
    identity: Path | None,
    launcher: str,
    http: Address,
    grpc: Address,
    page: Address | None,
    cluster: str,
    cores_per_lane: int | None,
    drain_s: float,
    start_timeout_s: float,
    trace_requests: Path | None,
    otlp: str | None,
    log_json: bool,
    ready_json: bool,
    **lane: Any,
) -> None:
    """Serve PACK: one region owner, N lanes and a coordinator, until Ctrl-C (a second one does not wait)."""
    configure_logging(json_lines=log_json, process="supervisor", level="info" if log_json else "warning")
    lane["vram_budget_bytes"] = lane_budget(lane["device"], lane["vram_budget_bytes"])
    tenants, tls = named_tenants(tenants, dict(os.environ)), named_tls(tls_cert, tls_key)
    try:
        for address in (http, grpc):
            check_reach(address, keys=tenants.is_file(), tls=tls is not None)
    except BadAddress as error:
        raise click.UsageError(error.message) from None
    check_park(park_bytes, park_disk_bytes)
    options = collect(check_pack(pack), log_json=log_json, **lane)
    facts = read_facts(options.pack)
    facts.check_context(options.context_tokens)
    check_room(facts, options, lanes, free_here())
    config = ServeConfig(
        lane=options,
        cluster=cluster,
        lanes=lanes,
        launcher=launcher,
        http=http,
        grpc=grpc,
        page=page,
        cores_per_lane=cores_per_lane,
        drain_s=drain_s,
        start_timeout_s=start_timeout_s,
        park_bytes=park_bytes,
        trace_requests=trace_requests,
        otlp=otlp,
        park_disk_bytes=park_disk_bytes,
        tenants=tenants,
        tls=tls,
        hosts=_host_door(join_at, identity),
        facts=facts,
    )
    if warning := facts.cache_warning(options.vram_budget_bytes):
        print(f"warning: {warning}", file=sys.stderr)
    progress = Progress()

    def on_ready(running: Running) -> None:
        progress.end()
        if ready_json:
            print(json.dumps(running.to_json()), flush=True)
        else:
            print(describe(running), flush=True)

    try:
        asyncio.run(run_cluster(config, dict(os.environ), progress.show, on_ready))
    finally:
        progress.end()  # an error stands on a line of its own


def _host_door(join_at: Address | None, identity: Path | None) -> HostDoor | None:
    if join_at is None:
        return None
    path = (identity or default_identities(dict(os.environ)) / "head.pem").absolute()
    Identity.load(path)
    return HostDoor(join_at, path)


def describe(running: Running) -> str:
    """What a person wants to know about a cluster that serves."""
    assert running.ready is not None
    lanes = sum(name.startswith("lane-") for name in running.pids)
    return "\n".join([
        f"{running.ready.model} on {lanes} lane{'s' if lanes > 1 else ''}, ready in {running.ready.seconds:.1f} s",
        f"  HTTP  http{'s' if running.config.tls else ''}://{running.config.http}/v1",
        f"  gRPC  {running.config.grpc}",
        *([f"  page  http://{running.config.page}/"] if running.config.page else []),
        f"  cores {', '.join(f'{name} {cores}' for name, cores in running.cores.told().items())}",
        "  Ctrl-C stops it",
    ])  # fmt: skip
