"""Ten times more than there is room for: refused at once, in bounded memory, and what was admitted is served.

Prints how long refusals took and what a coordinator adds to a token; figures of a quiet machine are in bench/LOG.md.
"""

from __future__ import annotations

import asyncio
import collections
import os
import statistics
import time
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors
from tests.fakes.lane import Script

PLACES = 10  # so that ten times as many calls fit one connection
REFUSED = "RESOURCE_EXHAUSTED queue_full True"


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_tenfold_overload_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=Script(token_delay_s=0.002), queue_requests=PLACES) as cluster:
        outcomes: collections.Counter[str] = collections.Counter()
        refused_s: list[float] = []
        prompt = serve_pb2.TokenIds(ids=[5 + k % 200 for k in range(3000)])

        async def ask() -> None:
            request = serve_pb2.GenerateRequest(token_ids=prompt, max_tokens=20)
            began = time.monotonic()
            try:
                events = [event async for event in cluster.stub.Generate(request)]
                outcomes[events[-1].finished.error_code or "whole"] += 1
            except grpc.aio.AioRpcError as error:
                refused_s.append(time.monotonic() - began)
                trailing = dict(error.trailing_metadata() or ())
                details = rpc_status.from_call(error).details
                told = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
                outcomes[f"{error.code().name} {trailing['expressway-error-code']} {told}"] += 1

        await asyncio.gather(*(ask() for _ in range(PLACES + 2)))  # what there is room for; and all code is warm
        assert outcomes == {"whole": PLACES + 2}
        before = rss_bytes()
        outcomes.clear()
        for _ in range(3):
            await asyncio.gather(*(ask() for _ in range(10 * (PLACES + 2))))
        assert outcomes.keys() == {"whole", REFUSED}
        assert outcomes["whole"] >= 3 * (PLACES + 2)
        assert sum(outcomes.values()) == 30 * (PLACES + 2)
        grown = rss_bytes() - before
        assert grown <= 64 << 20
        refused_s.sort()
        print(
            f"refused {outcomes[REFUSED]}, p50 {1e3 * statistics.median(refused_s):.1f} ms,"
            f" p99 {1e3 * refused_s[int(0.99 * len(refused_s))]:.1f} ms, memory +{grown >> 20} MiB"
        )


async def test_a_stream_passes_whole_through_a_coordinator(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=Script(), vocab_size=384) as cluster:
        added_s: list[float] = []
        begin = time.monotonic()
        async for event in cluster.stub.Generate(
            serve_pb2.GenerateRequest(token_ids=serve_pb2.TokenIds(ids=[5]), max_tokens=3000)
        ):
            now_ns = time.monotonic_ns()
            added_s += [(now_ns - token.stamp_ns) / 1e9 for token in event.delta.tokens]
        seconds = time.monotonic() - begin
        assert len(added_s) == 3000
        print(f"{3000 / seconds:.0f} tokens/s relayed; from the lane's stamp to the client, p50 "
              f"{1e3 * statistics.median(added_s):.2f} ms")  # fmt: skip
