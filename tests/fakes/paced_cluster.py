"""The real coordinator on simulated lanes that make a token every few milliseconds, each in a process of its own.

    python -m tests.fakes.paced_cluster --lanes 8 --pace-s 0.02

prints one line of JSON when all lanes serve: addresses of the doors and lanes, process ids, the folder of traces. Ends
with its standard input. Not here: anything measured (bench.gaps).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import grpc.aio

from coordinator.config import Address, choose_address
from coordinator.host.supervisor import COORDINATOR, Managed, Supervisor, serve_keepers
from coordinator.launchers.base import ProcessSpec, module_argv
from coordinator.launchers.local import LocalLauncher
from coordinator.logs import configure_logging
from laneproto.v1 import serve_pb2, serve_pb2_grpc
from tests.fakes.doors import VOCAB_SIZE, spelt, tokenizer_dir

ROOT = Path(__file__).parents[2]
START_S = 120.0


async def main(lanes: int, pace_s: float, folder: Path) -> None:
    """Until nobody holds the other end of standard input."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    (token,) = spelt("x")  # one event for each: no character that waits for its other half
    names = [f"lane-{number}" for number in range(lanes)]
    at = {name: f"unix:{folder}/{name}.sock" for name in names}
    traces = folder / "traces"
    traces.mkdir()
    http, page = choose_address(Address("127.0.0.1")), choose_address(Address("127.0.0.1"))
    managed = [
        Managed(
            ProcessSpec(
                name,
                (sys.executable, "-m", "tests.fakes.lane", "--listen", at[name], "--name", name,
                 "--token-delay-s", str(pace_s), "--token", str(token), "--vocab", str(VOCAB_SIZE)),
                env, folder / f"{name}.log",
            ),
            at[name],
        )
        for name in names
    ]  # fmt: skip
    argv = module_argv(
        "coordinator", "--supervisor", f"unix:{folder}/supervisor.sock", "--pack", str(tokenizer_dir()),
        "--http", str(http), "--grpc", f"unix:{folder}/grpc.sock", "--page", str(page), "--trace-requests", str(traces),
    )  # fmt: skip
    managed.append(Managed(ProcessSpec(COORDINATOR, argv, env, folder / "coordinator.log")))
    supervisor = Supervisor(managed, LocalLauncher())
    server = await serve_keepers(supervisor, folder / "supervisor.sock")
    try:
        await supervisor.start_all()
        async with asyncio.timeout(START_S), grpc.aio.insecure_channel(f"unix:{folder}/grpc.sock") as channel:
            stub = serve_pb2_grpc.ExpresswayStub(channel)
            while True:
                listed = await stub.ListLanes(serve_pb2.ListLanesRequest(), wait_for_ready=True)
                if [lane.state for lane in listed.lanes] == ["ready"] * lanes:
                    break
                await asyncio.sleep(0.1)
        pids = {name: keeper.pid for name, keeper in supervisor.keepers.items()}
        doors = {"http": str(http), "grpc": f"unix:{folder}/grpc.sock", "page": str(page), "traces": str(traces)}
        print(json.dumps({**doors, "lanes": list(at.values()), "pids": pids}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await supervisor.close()
        await server.stop(0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--pace-s", type=float, default=0.02)
    options = parser.parse_args()
    configure_logging(json_lines=False, process="paced")
    with tempfile.TemporaryDirectory(prefix="exw-") as name:
        asyncio.run(main(options.lanes, options.pace_s, Path(name)))
