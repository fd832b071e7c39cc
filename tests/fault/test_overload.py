"""Ten times more than there is room for: refused at once, in bounded memory, and what was admitted is served.

Prints how long refusals took and what a coordinator adds to a token; figures of a quiet machine are in bench/LOG.md.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator.auth import Auth
from coordinator.doors.grpc import GENERATE
from coordinator.limits import SMALL_BODY_BYTES
from coordinator.tenants import hash_key
from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors, until
from tests.fakes.lane import Script

PLACES = 10  # so that ten times as many calls fit one connection
CAPACITY_PER_S = 25  # of two lanes that write 20 tokens in about 80 ms
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
        at_once_s, refused_s = sorted(refused_s), []
        asking = []
        for _ in range(10 * CAPACITY_PER_S):  # a second of it, one call after the other
            asking.append(asyncio.create_task(ask()))
            await asyncio.sleep(0.1 / CAPACITY_PER_S)
        await asyncio.gather(*asking)
        assert outcomes.keys() == {"whole", REFUSED}
        grown = rss_bytes() - before
        assert grown <= 64 << 20
        for name, found_s in (("at once", at_once_s), ("one after the other", sorted(refused_s))):
            print(
                f"{name}: refused {len(found_s)}, p50 {1e3 * statistics.median(found_s):.1f} ms,"
                f" p99 {1e3 * found_s[int(0.99 * len(found_s))]:.1f} ms, memory +{grown >> 20} MiB"
            )


async def test_what_is_refused_for_its_place_is_refused_before_it_is_looked_at(tmp_path: Path) -> None:
    """Under overload, everybody waits for what the refusals of others cost: a prompt is not even tokenized."""
    async with open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.005), queue_requests=1) as cluster:
        kept = [asyncio.create_task(cluster.generate(text="x", max_tokens=400)) for _ in range(2)]
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        cluster.doors.serving.text.encode_text = None  # type: ignore[assignment,method-assign]
        with pytest.raises(grpc.aio.AioRpcError, match="places of the queue"):
            await cluster.generate(text="x" * 1000)
        for body in ({"prompt": "x"}, {"no": "request", "filler": "x" * SMALL_BODY_BYTES}):
            status, headers, answer = await cluster.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert "retry-after" in headers
        # what a small body and the head say is looked at first: that costs little, and coming again would not help
        status, _, answer = await cluster.post("/v1/completions", {"no": "request"})
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        for headers, wanted in (
            ({"content-type": "text/plain"}, (415, "unsupported_media_type")),
            ({"x-priority": "first"}, (400, "out_of_range")),
        ):
            status, _, answer = await cluster.post("/v1/completions", {"prompt": "x"}, headers)
            assert (status, answer["error"]["code"]) == wanted
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)


async def test_a_call_is_refused_by_its_head_alone(tmp_path: Path) -> None:
    """Before its message is read: there may be 8 MiB of it, and who has no key or no place is owed none of the work."""
    tenants = tmp_path / "tenants.json"
    tenants.write_bytes(b'{"tenants": [{"name": "a", "keys": ["%s"]}]}' % hash_key("k").encode())
    tenants.chmod(0o600)
    (tmp_path / "s").mkdir()
    script = Script(token_delay_s=0.005)
    keyed = (("x-api-key", "k"),)
    async with open_doors(tmp_path / "s", lanes=1, script=script, queue_requests=1, auth=Auth(tenants)) as cluster:
        outcomes: list[str] = []
        cluster.doors.serving.recorder.request = lambda door, outcome: outcomes.append(outcome)  # type: ignore[method-assign]

        async def refused(*head: tuple[str, str]) -> tuple[str, str]:
            async def says_nothing() -> AsyncIterator[serve_pb2.GenerateRequest]:
                await asyncio.Event().wait()
                yield serve_pb2.GenerateRequest()

            call = cluster.channel.stream_stream(GENERATE)(says_nothing(), metadata=head)
            async with asyncio.timeout(60):
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await call.read()
            trailing = dict(found.value.trailing_metadata() or ())
            return found.value.code().name, str(trailing["expressway-error-code"])

        assert await refused() == ("UNAUTHENTICATED", "unauthorized")
        assert await refused(*keyed, ("x-priority", "first")) == ("INVALID_ARGUMENT", "out_of_range")
        kept = [asyncio.create_task(cluster.generate(keyed, text="x", max_tokens=400)) for _ in range(2)]
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        assert await refused(*keyed) == ("RESOURCE_EXHAUSTED", "queue_full")
        assert outcomes == ["out_of_range", "queue_full"]
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)


async def test_the_bench_of_refusals_fills_a_queue_and_is_refused(tmp_path: Path) -> None:
    """`bench.refusals` against a server that runs, as a process of its own; it fails at anything but a refusal."""
    async with open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.5), queue_requests=PLACES) as cluster:
        bench = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.refusals", "--calls", "20", "--rounds", "2",
            "--http", str(cluster.doors.http), "--grpc", str(cluster.doors.grpc),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await bench.communicate()
        assert bench.returncode == 0, out.decode()
        assert json.loads(out)["milliseconds"].keys() == {"http_open", "http_new", "grpc_open"}
        await until(lambda: cluster.doors.serving.dispatcher.queued == 0, 60.0)  # who filled the queue has gone


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
