"""`python -m coordinator …`: the coordinator process. Started by the supervisor, not by people (`expressway serve`).

Invariant: exit code 0 after SIGTERM, 1 when it cannot serve (last line `error: CODE: reason`), 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from coordinator.config import CoordinatorConfig, HostDoor, parse_door, parse_host_door, parse_page
from coordinator.errors import CoordinatorError
from coordinator.logs import configure_logging
from coordinator.pauses import give_way
from coordinator.service import run_coordinator
from coordinator.telemetry.spans import check_otlp
from coordinator.tls import named_tls


@click.command()
@click.option("--supervisor", required=True, metavar="unix:PATH", help="The supervisor's socket.")
@click.option("--pack", required=True, type=click.Path(path_type=Path), help="The pack, for its tokenizer.")
@click.option("--http", required=True, metavar="HOST:PORT")
@click.option("--grpc", required=True, metavar="HOST:PORT|unix:PATH")
@click.option("--page", metavar="HOST:PORT", help="Open the page and /metrics there.")
@click.option("--owner", type=click.Path(path_type=Path), help="The owner's socket, for the page.")
@click.option("--trace-requests", type=click.Path(path_type=Path), help="A directory for traces of requests.")
@click.option("--otlp", metavar="URL", help="A collector that spans of requests are sent to.")
@click.option("--tenants", type=click.Path(path_type=Path), help="The file of keys, which need not be there.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate of both doors.")
@click.option("--tls-key", type=click.Path(path_type=Path))
@click.option("--join-at", metavar="HOST:PORT", help="Where other hosts join.")
@click.option("--identity", type=click.Path(path_type=Path), help="This host's certificate for them.")
@click.option("--alike", multiple=True, metavar="OPTION=VALUE", help="Of lanes, on every host.")
@click.option("--drain-s", type=float, default=10.0, help="How long running answers may go on after SIGTERM.")
@click.option("--log-json", is_flag=True)
def command(
    supervisor: str,
    pack: Path,
    http: str,
    grpc: str,
    page: str | None,
    owner: Path | None,
    trace_requests: Path | None,
    otlp: str | None,
    tenants: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    join_at: str | None,
    identity: Path | None,
    alike: tuple[str, ...],
    drain_s: float,
    log_json: bool,
) -> None:
    """Requests to lanes: doors, queue, placement, and the restarts of lanes and owner."""
    others = join_at and identity and HostDoor(parse_host_door(join_at), identity, dict(map(_pair, alike)))
    configure_logging(json_lines=log_json, process="coordinator")
    give_way()
    config = CoordinatorConfig(
        supervisor,
        pack,
        parse_door(http),
        parse_door(grpc),
        drain_s,
        parse_page(page) if page else None,
        owner,
        trace_requests,
        check_otlp(otlp) if otlp else None,
        tenants,
        named_tls(tls_cert, tls_key),
        others or None,
    )
    asyncio.run(run_coordinator(config))


def _pair(words: str) -> tuple[str, str]:
    option, _, value = words.partition("=")
    return option, value


def main() -> None:
    """Run the process and exit with its code."""
    try:
        command.main(standalone_mode=False)
    except click.UsageError as error:
        print(f"error: usage: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except CoordinatorError as error:
        print(f"error: {error.code}: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
