"""`expressway cluster …`: several hosts as one cluster: certificates for them, and the command that joins one.

Not here: the host that joins (host.member), the door that it knocks at (`serve --join-at`). Invariant: with
`--ready-json` stdout carries exactly one line, whether the host becomes ready or fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from coordinator.cli import host_options
from coordinator.cli.lane_options import collect, lane_options
from coordinator.cli.progress import Progress
from coordinator.cli.values import HOSTS_AT, PARK, SIZE, Parsed
from coordinator.config import (
    AUTO,
    Address,
    check_pack,
    check_park,
    default_identities,
    lane_budget,
)
from coordinator.errors import BadAddress
from coordinator.host import authority
from coordinator.host.identity import check_host
from coordinator.host.member import Member, MemberConfig, run_member
from coordinator.host.room import check_room, free_here
from coordinator.logs import configure_logging
from coordinator.pack_facts import read_facts

_HEAD = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):[0-9]{1,5}")

_folder = click.option(
    "--identities", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Default: ~/.config/expressway/hosts.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


def _parse_head(text: str) -> str:
    if not _HEAD.fullmatch(text):
        raise BadAddress(f"{text!r}: expected HOST:PORT")
    return text


def _parse_suffix(text: str) -> str:
    return check_host(text) if text else ""


@click.group()
def command() -> None:
    """Make one cluster of several hosts."""


@command.command(short_help="Make the cluster's authority and the head's certificate.")
@_folder
@_json
def init(folder: Path | None, as_json: bool) -> None:
    """Make the cluster's certificate authority, and the certificate of the host that runs `serve --join-at`."""
    _made(authority.create(folder or default_identities(dict(os.environ))), as_json)


@command.command(short_help="Make the certificate of host NAME.")
@click.argument("name")
@_folder
@_json
def invite(name: str, folder: Path | None, as_json: bool) -> None:
    """Make the certificate of host NAME: a file to be copied there (0600), for `cluster join --identity`."""
    _made(authority.invite(folder or default_identities(dict(os.environ)), name), as_json)


@command.command(short_help="Shut out host NAME, or a certificate.")
@click.argument("name")
@_folder
@_json
def revoke(name: str, folder: Path | None, as_json: bool) -> None:
    """Shut host NAME out, or the certificate sha256:…: a running head gives it no more work within a second.

    NAME may be invited again afterwards; the new certificate is another one.
    """
    found = authority.revoke(folder or default_identities(dict(os.environ)), name)
    print(json.dumps({"revoked": found}) if as_json else found)


@command.command(short_help="Serve PACK as one more host of a cluster.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--head", required=True, type=Parsed("address", _parse_head), metavar="HOST:PORT",
              help="The --join-at of the cluster's `serve`.")  # fmt: skip
@click.option("--listen", "gate", required=True, type=HOSTS_AT, metavar="HOST:PORT",
              help="Where the coordinator reaches this host. Port 0: a free one.")  # fmt: skip
@click.option("--identity", type=click.Path(path_type=Path), metavar="FILE",
              help="From `cluster invite`. Default: ~/.config/expressway/hosts/host.pem.")  # fmt: skip
@click.option("--suffix", default="", type=Parsed("name", _parse_suffix), metavar="NAME",
              help="For hosts that share a certificate: this one is then CERTIFICATE.NAME.")  # fmt: skip
@host_options.lanes
@lane_options
@click.option("--park", "park_bytes", type=PARK, default=AUTO, show_default=True, metavar="SIZE",
              help="Of this host, for conversations that left a lane's memory. auto: an eighth of what is free beside "
                   "the region, at least 1GiB. 0: none.")  # fmt: skip
@click.option("--park-disk", "park_disk_bytes", type=SIZE, default="0", show_default=True, metavar="SIZE",
              help="Keeps them in the state directory, too. 0: no.")  # fmt: skip
@host_options.cluster
@host_options.cores_per_lane
@click.option("--drain", "drain_s", type=click.FloatRange(0, 3600), default=10.0, show_default=True, metavar="SECONDS",
              help="How long answers may go on here when told to stop; then others go on with them.")  # fmt: skip
@host_options.start_timeout
@host_options.log_json
@host_options.ready_json
def join(
    pack: Path,
    head: str,
    gate: Address,
    identity: Path | None,
    suffix: str,
    lanes: int,
    park_bytes: int,
    park_disk_bytes: int,
    cluster: str,
    cores_per_lane: int | None,
    drain_s: float,
    start_timeout_s: float,
    log_json: bool,
    ready_json: bool,
    **lane: Any,
) -> None:
    """Serve PACK as one more host of a cluster: an owner and N lanes, without doors, until Ctrl-C."""
    configure_logging(json_lines=log_json, process="supervisor", level="info" if log_json else "warning")
    lane["vram_budget_bytes"] = lane_budget(lane["device"], lane["vram_budget_bytes"])
    check_park(park_bytes, park_disk_bytes)
    options = collect(check_pack(pack), log_json=log_json, **lane)
    facts = read_facts(options.pack)
    facts.check_context(options.context_tokens)
    check_room(facts, options, lanes, free_here())
    identity = (identity or default_identities(dict(os.environ)) / "host.pem").absolute()
    config = MemberConfig(
        options, cluster, lanes, head, gate, identity, cores_per_lane, drain_s, start_timeout_s,
        park_bytes, park_disk_bytes, suffix, facts,
    )  # fmt: skip
    progress = Progress()

    def on_ready(member: Member) -> None:
        progress.end()
        said = f"{member.name} of {head}: {lanes} lane{'s' if lanes > 1 else ''}, ready in {member.seconds:.1f} s"
        print(json.dumps(member.to_json()) if ready_json else said, flush=True)

    try:
        asyncio.run(run_member(config, dict(os.environ), progress.show, on_ready))
    finally:
        progress.end()  # an error stands on a line of its own


def _made(path: Path, as_json: bool) -> None:
    print(json.dumps({"file": str(path)}) if as_json else path)
    if not as_json:
        print("keep it private; it is this cluster's key", file=sys.stderr)
