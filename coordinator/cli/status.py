"""`expressway status`: what a running cluster of this host says about itself; with several, which there are.

Not here: starting or stopping. Invariant: exit code 0 only when the coordinator answered, or when there are several
clusters and none was named.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import click
import grpc
from rich.console import Console
from rich.table import Table

from coordinator.channel import open_channel
from coordinator.cli.answer import counters
from coordinator.cli.values import CLUSTER
from coordinator.client import refusal
from coordinator.errors import RunDirError
from coordinator.host.clusters import RunningCluster, running_clusters
from coordinator.host.owner_status import ask_owner
from coordinator.host.rundir import read_cluster, run_path
from laneproto.v1 import serve_pb2, serve_pb2_grpc

TIMEOUT_S = 5.0


@click.command(short_help="Show lanes, model and region of a running cluster.")
@click.option("--cluster", type=CLUSTER, metavar="NAME", help="Default: the one that runs; of several, a list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(cluster: str | None, as_json: bool) -> None:
    """Show the lanes, the model and the region of a cluster that runs on this host."""
    env = dict(os.environ)
    if cluster is None:
        running = running_clusters(env)
        if not running:
            raise RunDirError("no cluster runs here")
        if len(running) > 1:
            if as_json:
                print(json.dumps({"clusters": [each.to_json() for each in running]}))
            else:
                show_clusters(running)
            return
        cluster = running[0].name
    found = read_cluster(cluster, env)
    if head := found.get("head"):
        raise RunDirError(f"this host serves in the cluster of {head}: ask there")
    owner = ask_owner(run_path(cluster, env) / "owner.sock")
    if not found.get("ready"):
        raise RunDirError(f"cluster {cluster!r} is not ready yet: owner {owner or 'starting'}")
    state = asyncio.run(ask_cluster(f"unix:{run_path(cluster, env)}/coordinator.sock"))
    state = {
        "cluster": cluster,
        **{key: found.get(key) for key in ("http", "grpc", "page", "run_dir", "pack", "launcher", "pids")},
        "owner": str(owner) if owner else "does not answer",
        **state,
    }
    if as_json:
        print(json.dumps(state))
    else:
        show(state)


async def ask_cluster(target: str) -> dict[str, Any]:
    """Lanes and model, from the coordinator's own socket, which needs no key."""
    async with open_channel(target) as channel:
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        try:
            lanes = await stub.ListLanes(serve_pb2.ListLanesRequest(), timeout=TIMEOUT_S)
            model = (await stub.GetModel(serve_pb2.GetModelRequest(), timeout=TIMEOUT_S)).model
        except grpc.aio.AioRpcError as error:
            raise refusal(error) from None
    return {
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "fingerprint": model.fingerprint.hex(),
            "context_tokens": model.context_tokens,
            "expert_format": model.expert_format,
            "region_bytes": model.region_bytes,
        },
        "queued": lanes.queued,
        "lanes": [
            {
                "lane": lane.lane,
                "host": lane.host,
                "state": lane.state,
                "pid": lane.pid,
                "device": lane.device,
                "restarts": lane.restarts,
                "running": lane.running,
                "counters": counters(lane.counters),
            }
            for lane in lanes.lanes
        ],
    }


def show_clusters(running: list[RunningCluster]) -> None:
    """For people: one line each."""
    table = Table("cluster", "model", "http", "grpc", "page", box=None)
    for each in running:
        shown = each.to_json()
        cells = (shown["model"] or "(starting)", *(shown[key] or "-" for key in ("http", "grpc", "page")))
        table.add_row(each.name, *map(str, cells))
    console = Console(highlight=False)
    console.print(table)
    console.print("--cluster NAME shows one of them")


def show(state: dict[str, Any]) -> None:
    """For people."""
    console = Console(highlight=False)
    model = state["model"]
    console.print(
        f"{model['name']} ({model['architecture']}, {model['expert_format']}, {model['context_tokens']} tokens)"
    )
    console.print(f"HTTP {state['http']}   gRPC {state['grpc']}   page {state['page'] or 'off'}")
    console.print(f"owner {state['owner']}   queued {state['queued']}")
    table = Table(box=None)
    table.add_column("lane", no_wrap=True)
    for column in ("state", "pid", "device", "restarts", "requests", "tokens", "expert hits"):
        table.add_column(column)
    for lane in state["lanes"]:
        counted = lane["counters"]
        routed = counted["expert_hits"] + counted["expert_misses"]
        hits = f"{100 * counted['expert_hits'] / routed:.1f} %" if routed else "-"
        table.add_row(
            *(str(lane[key]) for key in ("lane", "state", "pid", "device", "restarts")),
            *(str(counted["requests"]), str(counted["generated_tokens"]), hits),
        )
    console.print(table)
