"""Waits until a cluster that has just been started serves, and says why when it does not.

Not here: starting and stopping (cluster, supervisor). Invariant: returns only when every lane has said READY to the
coordinator and the public door answers; any process that ends before that ends the wait with its own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from coordinator.errors import StartFailed
from coordinator.fleet.states import OWNER
from coordinator.host.owner_status import ask_owner
from coordinator.host.supervisor import Keeper, Supervisor
from laneproto.v1 import serve_pb2, serve_pb2_grpc

POLL_S = 0.2
CALL_TIMEOUT_S = 2.0
LOG_LINES_SHOWN = 12

OnProgress = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Ready:
    """What a cluster that serves says about itself."""

    model: str
    seconds: float


async def wait_ready(
    supervisor: Supervisor, owner_socket: Path, public: str, timeout_s: float, on_progress: OnProgress
) -> Ready:
    """Follow the start; `public` is a gRPC target of the public service. StartFailed carries the reason."""
    began = time.monotonic()
    lanes = {name for name, keeper in supervisor.keepers.items() if keeper.managed.address}
    async with grpc.aio.insecure_channel(public, options=_FAST_RECONNECT) as channel:
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        while True:
            seen = supervisor.version
            check_alive(supervisor)
            owner = await asyncio.to_thread(ask_owner, owner_socket)
            states = await _lane_states(stub)
            on_progress({OWNER: str(owner) if owner else "starting", **{n: states.get(n, "starting") for n in lanes}})
            if lanes and all(states.get(name) in ("ready", "busy") for name in lanes):
                model = await stub.GetModel(serve_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S)
                return Ready(model.model.name, time.monotonic() - began)
            if time.monotonic() - began > timeout_s:
                raise StartFailed(
                    f"not ready after {timeout_s:g} s: owner {owner or 'does not answer'}, lanes {states}"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(supervisor.change(seen), POLL_S)


def check_alive(supervisor: Supervisor) -> None:
    """StartFailed for the first process that has ended, the owner before those that need it."""
    for name, keeper in supervisor.keepers.items():
        if keeper.exit_code is not None or keeper.starts > 1:
            raise StartFailed(explain_exit(name, keeper))


def explain_exit(name: str, keeper: Keeper) -> str:
    """Why a process ended, in its own words."""
    code = keeper.exit_code
    how = "ended" if code is None else f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
    lines = keeper.log_tail().splitlines()
    reasons = [line for line in lines if line.startswith("error:")]
    if reasons:
        return f"{name} {how}: {reasons[-1].removeprefix('error:').strip()}"
    tail = "\n    ".join(lines[-LOG_LINES_SHOWN:]) or "(it wrote nothing)"
    return f"{name} {how}; see {keeper.managed.spec.log_path}\n    {tail}"


async def _lane_states(stub: serve_pb2_grpc.ExpresswayStub) -> dict[str, str]:
    try:
        reply = await stub.ListLanes(serve_pb2.ListLanesRequest(), timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return {}  # the door is not open yet
    return {lane.lane: lane.state for lane in reply.lanes}


_FAST_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]
