"""One owner, one lane and the doors in this process, for a single command: what `generate PACK` asks.

The same parts as a cluster without the coordinator process, in a run directory of its own. Not here: the question.
Invariant: when the context ends, its processes and its directory are gone.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from coordinator.config import Address
from coordinator.cores import layout
from coordinator.fleet.roster import FleetRoster
from coordinator.frontdoor import start_doors
from coordinator.host.lane_options import LaneOptions
from coordinator.host.plan import plan_lane, plan_owner
from coordinator.host.rundir import RunDir
from coordinator.host.startup import OnProgress, check_alive, wait_ready
from coordinator.host.supervisor import Supervisor, serve_keepers
from coordinator.host.supervisor_client import SupervisorClient
from coordinator.host.topology import allowed_cores
from coordinator.launchers.local import LocalLauncher


@dataclass(frozen=True, slots=True)
class Solo:
    """A lane that is ready."""

    target: str  # of the public gRPC door
    supervisor: Supervisor

    def check(self) -> None:
        """StartFailed, with its last words, when one of the processes has ended."""
        check_alive(self.supervisor)


@asynccontextmanager
async def solo(
    options: LaneOptions, env: Mapping[str, str], timeout_s: float, on_progress: OnProgress
) -> AsyncIterator[Solo]:
    """Start, wait until ready, stop. A `SetupError` says why it could not be done."""
    os.umask(0o077)
    async with AsyncExitStack() as stack:
        run_dir = RunDir.temporary(env)
        stack.callback(run_dir.release)
        (cores,) = layout(allowed_cores(), 1, gpu=options.device == "cuda").lanes
        processes = [
            plan_owner(options.pack, run_dir, env, log_json=options.log_json),
            plan_lane(options, 0, run_dir, cores, env),
        ]
        supervisor = Supervisor(processes, LocalLauncher())
        stack.push_async_callback(supervisor.shutdown, 0.0)
        await supervisor.start_all()  # the region fills while the rest is put together
        keepers = await serve_keepers(supervisor, run_dir.socket("supervisor"))
        stack.push_async_callback(keepers.stop, 0.0)
        client = SupervisorClient(f"unix:{run_dir.socket('supervisor')}")
        stack.push_async_callback(client.close)
        roster = await stack.enter_async_context(FleetRoster(client))
        http, grpc = (Address(path=str(run_dir.socket(name))) for name in ("http", "grpc"))
        doors = await start_doors(roster, options.pack, http=http, grpc_at=grpc)
        stack.push_async_callback(doors.close)
        await wait_ready(supervisor, run_dir.socket("owner"), str(grpc), timeout_s, on_progress)
        yield Solo(str(grpc), supervisor)
