"""`expressway lane …`: lanes of a running cluster are drained, restarted, added and removed.

Not here: what that means (operations, in the coordinator). Invariants: progress goes to stderr, `--json` prints one
object on stdout; the command ends when the operation has, and Ctrl-C leaves a lane that was to restart in service.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import click
import grpc

from coordinator.channel import open_channel
from coordinator.cli.values import CLUSTER
from coordinator.client import refusal
from coordinator.host.clusters import the_cluster
from coordinator.host.rundir import read_cluster, run_path
from laneproto.v1 import admin_pb2, admin_pb2_grpc

Call = Callable[[admin_pb2_grpc.AdminStub], Any]


@click.group(short_help="Drain, restart, add and remove lanes of a cluster.")
def command() -> None:
    """Take lanes of a running cluster out of service and back, restart, add or remove them."""


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    function = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(function)
    return click.option("--cluster", type=CLUSTER, metavar="NAME", help="Default: the one that runs.")(function)


@command.command(short_help="No new work for LANE, or for all lanes of HOST/.")
@click.argument("lane")
@click.option("--stop", is_flag=True, help="End its process, too.")
@_shared
def drain(lane: str, stop: bool, cluster: str | None, as_json: bool) -> None:
    """No new work for LANE, or for all lanes of HOST/; returns when what they have is done."""
    _run(cluster, as_json, lambda stub: stub.Drain(admin_pb2.DrainRequest(lane=lane, stop=stop)))


@command.command(short_help="LANE, or all of HOST/, into service again.")
@click.argument("lane")
@_shared
def undrain(lane: str, cluster: str | None, as_json: bool) -> None:
    """LANE, or all of HOST/, into service again: after a drain, a stop, or out of quarantine."""
    _run(cluster, as_json, lambda stub: _one(stub.Undrain(admin_pb2.LaneName(lane=lane))))


@command.command(short_help="Restart LANES one after the other, without cutting a stream.")
@click.argument("lanes", nargs=-1)
@_shared
def restart(lanes: tuple[str, ...], cluster: str | None, as_json: bool) -> None:
    """Restart LANES, by default all, one after the other, without cutting a stream."""
    _run(cluster, as_json, lambda stub: stub.Restart(admin_pb2.RestartRequest(lanes=lanes)))


@command.command(short_help="One more lane, with the options of the others.")
@click.option("--host", default="", metavar="NAME", help="Of a host that joined. Default: the coordinator's own.")
@_shared
def add(host: str, cluster: str | None, as_json: bool) -> None:
    """One more lane, with the options of the others there; it shares their cores."""
    _run(cluster, as_json, lambda stub: _one(stub.Add(admin_pb2.AddRequest(host=host))))


@command.command()
@click.argument("lane")
@_shared
def remove(lane: str, cluster: str | None, as_json: bool) -> None:
    """Drain LANE, stop it and forget it."""
    _run(cluster, as_json, lambda stub: stub.Remove(admin_pb2.LaneName(lane=lane)), end="removed")


async def _one(reply: Any) -> AsyncIterator[Any]:
    yield await reply


def _run(named: str | None, as_json: bool, call: Call, *, end: str = "") -> None:
    """`end`: said of the lane at the end instead of its last state."""
    env = dict(os.environ)
    cluster = the_cluster(named, env)
    read_cluster(cluster, env)  # says in words when there is none
    socket = run_path(cluster, env) / "coordinator.sock"
    last = asyncio.run(_follow(f"unix:{socket}", call, end))
    if as_json:
        print(json.dumps(last))


async def _follow(target: str, call: Call, end: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async with open_channel(target) as channel:
        try:
            async for message in call(admin_pb2_grpc.AdminStub(channel)):
                told = {"lane": message.lane}
                if isinstance(message, admin_pb2.Progress):
                    told |= {"state": message.state, "doing": message.doing, "running": message.running}
                if told != last:
                    print(progress_line(told, end), file=sys.stderr, flush=True)
                last = told
        except grpc.aio.AioRpcError as error:
            raise refusal(error) from None
    return last


def progress_line(told: dict[str, Any], end: str = "") -> str:
    """`lane-0: draining, 2 answers running`, and the lane's name alone where it is all that is told."""
    doing, running = told.get("doing", ""), told.get("running", 0)
    if end and doing == "done":
        return f"{told['lane']}: {end}"
    parts = [told["state"]] if "state" in told else []
    if doing and doing not in ("done", told["state"]):
        parts.append(doing)
    if running:
        parts.append(f"{running} answer{'s' if running > 1 else ''} running")
    return f"{told['lane']}: {', '.join(parts)}" if parts else str(told["lane"])
