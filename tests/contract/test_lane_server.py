"""lane.proto as a lane keeps it, on a real socket, over a fake model."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import textwrap
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laneproto.v1 import lane_pb2 as pb
from laneproto.v1 import lane_pb2_grpc as rpc
from lanes import limits
from lanes.counters import Counters
from lanes.engine import Engine
from lanes.errors import StartError
from lanes.experts.cache import Cached
from lanes.server import LaneServer, prepare_socket
from lanes.state.prefixes import Place, PrefixLog
from lanes.wire import Identity
from tests.fakes.runner import VOCAB, FakeRunner, next_token

CONTEXT = 100_000


class Rig:
    """A server, its engine and a stub."""

    def __init__(self, folder):
        self.path = folder / "run" / "lane-0.sock"
        self.runner = FakeRunner()
        self.engine = Engine(self.runner, Counters(), prefill_chunk_rows=4)
        self.prefixes = PrefixLog()

    async def __aenter__(self):
        identity = Identity(
            "lane-0", b"i" * 16, os.getpid(), "cpu", "fake", "fake_arch", b"f" * 32, VOCAB, CONTEXT, (2, 7), "f32", 4096
        )  # fmt: skip
        self.server = LaneServer(self.engine, identity, self.prefixes, lambda: Cached((3, 0), 4))
        self.engine.start()
        await self.server.start(self.path)
        self.channel = grpc.aio.insecure_channel(f"unix:{self.path}")
        self.stub = rpc.LaneStub(self.channel)
        return self

    async def __aexit__(self, *_):
        if self.runner.gate:
            self.runner.gate.set()
        await self.channel.close()
        await self.server.stop(0)
        await asyncio.to_thread(self.engine.stop)
        assert not self.runner.open

    def hold(self):
        self.runner.gate = threading.Event()
        return self.runner.gate

    async def free(self):
        while self.engine.status().state != "ready":
            await asyncio.sleep(0.005)

    async def ask(self, **changes):
        return [event async for event in self.stub.Generate(message(**changes))]


@pytest.fixture
async def rig(tmp_path):
    async with Rig(tmp_path) as rig:
        yield rig


def message(**changes):
    return pb.GenerateRequest(**({"request_id": "r1", "prompt_ids": [1, 2, 3, 4, 5], "max_tokens": 4} | changes))


def kinds(events):
    return [event.WhichOneof("event") for event in events]


def ids(events):
    return [token.id for event in events for token in event.tokens.tokens]


def code_of(error):
    return dict(error.value.trailing_metadata()).get("expressway-error-code")


async def test_hello(rig):
    reply = await rig.stub.Hello(pb.HelloRequest(protocol_version=1))
    assert (reply.protocol_version, reply.lane, reply.device) == (1, "lane-0", "cpu")
    assert reply.incarnation == b"i" * 16
    assert reply.model.vocab_size == VOCAB
    assert reply.model.context_tokens == CONTEXT
    assert reply.model.max_output_tokens == CONTEXT - 1
    assert list(reply.model.eos_ids) == [2, 7]
    assert reply.status.state == pb.LANE_STATE_READY


@pytest.mark.parametrize("version", [0, 2])
async def test_hello_of_another_version(rig, version):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.stub.Hello(pb.HelloRequest(protocol_version=version))
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(error) == "bad_protocol_version"


async def test_a_stream_is_accepted_chunks_and_one_finished(rig):
    events = await rig.ask(logprobs=True, top_logprobs=2)
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-1] == "finished"
    assert set(kinds(events)[1:-1]) == {"tokens"}
    assert kinds(events).count("finished") == kinds(events).count("accepted") == 1
    answer, last = [], [4, 5]
    for position in range(4, 8):
        last = next_token(last[-1] if not answer else answer[-1], position), None
        answer.append(last[0])
    assert ids(events) == answer
    tokens = [token for event in events for token in event.tokens.tokens]
    assert all(len(token.top) == 2 and token.top[0].id == token.id for token in tokens)
    assert tokens[0].logprob == tokens[0].top[0].logprob < 0
    assert events[0].accepted.stamp_ns <= tokens[0].stamp_ns <= tokens[-1].stamp_ns
    end = events[-1].finished
    assert end.reason == pb.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (5, 4, 0)
    assert (end.counters.requests, end.counters.generated_tokens) == (1, 4)
    assert not end.error_code


async def test_usage_tells_what_was_not_read(rig):
    rig.runner.known = 3
    end = (await rig.ask(checkpoint_positions=[2, 5], tenant_salt=b"t"))[-1].finished
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.restored_tokens) == (5, 3, 1)


async def test_prefixes_are_a_snapshot_and_then_changes(rig):
    keys = [(bytes([n]) * 16, 64 * n) for n in (1, 2)]
    rig.prefixes.publish({keys[0]: Place.LIVE})
    call = rig.stub.Prefixes(pb.PrefixesRequest())
    first = await call.read()
    assert (first.sequence, first.snapshot, first.complete) == (1, True, True)
    assert [(p.chain, p.tokens, p.place) for p in first.added] == [(*keys[0], pb.PREFIX_PLACE_LIVE)]
    rig.prefixes.publish({keys[1]: Place.PARKED})
    second = await call.read()
    assert (second.sequence, second.snapshot) == (2, False)
    assert [(p.chain, p.tokens, p.place) for p in second.added] == [(*keys[1], pb.PREFIX_PLACE_PARKED)]
    assert [(p.chain, p.tokens) for p in second.removed] == [keys[0]]
    call.cancel()
    watched = await rig.stub.Watch(pb.WatchRequest()).read()
    assert (watched.prefix_sequence, watched.resident_sequences) == (2, 0)
    assert (list(watched.cached_experts), watched.layer_experts) == ([3, 0], 4)


async def test_long_answers_arrive_whole_in_bounded_chunks(rig):
    events = await rig.ask(max_tokens=5000)
    assert len(ids(events)) == 5000
    assert max(len(event.tokens.tokens) for event in events) <= limits.CHUNK_TOKENS


async def test_a_replay_over_the_wire_is_the_rest_of_the_answer(rig):
    sampling = pb.Sampling(
        temperature=2.5, seed=8, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.3, presence_penalty=1.0,
        frequency_penalty=0.5, logit_bias={3: 4.0, 9: -50.0}, min_tokens=6,
    )  # fmt: skip
    asked = {"sampling": sampling, "max_tokens": 12, "stop_ids": [2, 7, 11]}
    whole = await rig.ask(**asked)
    ids = [token.id for event in whole for token in event.tokens.tokens]
    for cut in (1, 3, len(ids) - 1):
        again = await rig.ask(**asked | {"prompt_ids": [1, 2, 3, 4, 5, *ids[:cut]], "replayed_tokens": cut})
        assert [token.id for event in again for token in event.tokens.tokens] == ids[cut:]
        assert again[-1].finished.usage == whole[-1].finished.usage
        assert again[-1].finished.reason == whole[-1].finished.reason


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids": []}, "empty_prompt"),
        ({"prompt_ids": [VOCAB]}, "token_out_of_range"),
        ({"prompt_ids": [1] * CONTEXT}, "context_length_exceeded"),
        ({"stop_ids": [1] * (limits.MAX_STOP_IDS + 1)}, "too_many_stop_ids"),
        ({"max_tokens": 0}, "bad_request"),
        ({"request_id": ""}, "bad_request"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "bad_sampling"),
        ({"sampling": pb.Sampling(logit_bias={1: float("inf")})}, "bad_sampling"),
        ({"sampling": pb.Sampling(logit_bias={VOCAB: 1.0})}, "token_out_of_range"),
        ({"sampling": pb.Sampling(min_tokens=5)}, "bad_sampling"),
        ({"replayed_tokens": 5}, "bad_request"),
    ],
)
async def test_refused_before_accepted_with_a_stable_code(rig, changes, code):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.ask(**changes)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(error) == code
    assert kinds(await rig.ask())[-1] == "finished"


async def test_a_second_generation_is_refused_and_the_first_unharmed(rig):
    gate = rig.hold()
    first = asyncio.create_task(rig.ask())
    await asyncio.to_thread(rig.runner.entered.acquire)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.ask(request_id="r2")
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(error) == "busy"
    gate.set()
    assert len(ids(await first)) == 4


async def test_free_again_the_moment_finished_arrives(rig):
    for turn in range(100):
        assert kinds(await rig.ask(request_id=f"r{turn}", max_tokens=1))[-1] == "finished"


@pytest.mark.parametrize("prompt", [[1] * 400, [1]])
async def test_cancel_by_id_ends_with_cancelled(rig, prompt):
    gate = rig.hold()
    stream = asyncio.create_task(rig.ask(prompt_ids=prompt, max_tokens=50_000))
    await asyncio.to_thread(rig.runner.entered.acquire)
    assert not (await rig.stub.Cancel(pb.CancelRequest(request_id="other"))).found
    assert (await rig.stub.Cancel(pb.CancelRequest(request_id="r1"))).found
    gate.set()
    events = await stream
    assert kinds(events).count("finished") == 1
    assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    assert len(rig.runner.windows) <= 1
    assert not (await rig.stub.Cancel(pb.CancelRequest(request_id="r1"))).found


async def test_a_cancelled_call_stops_its_generation(rig):
    call = rig.stub.Generate(message(max_tokens=90_000))
    await call.read()
    call.cancel()
    await rig.free()
    assert rig.engine.status().counters.cancelled == 1
    assert rig.engine.status().counters.generated_tokens < 90_000
    assert len(ids(await rig.ask())) == 4


async def test_a_closed_connection_stops_its_generation(rig):
    channel = grpc.aio.insecure_channel(f"unix:{rig.path}", options=[("grpc.use_local_subchannel_pool", 1)])
    call = rpc.LaneStub(channel).Generate(message(max_tokens=90_000))
    await call.read()
    await channel.close()
    await rig.free()
    assert rig.engine.status().counters.cancelled == 1


CLIENT = """
    import grpc, os, sys
    from laneproto.v1 import lane_pb2 as pb, lane_pb2_grpc as rpc
    with grpc.insecure_channel(sys.argv[1]) as channel:
        for event in rpc.LaneStub(channel).Generate(
            pb.GenerateRequest(request_id="r1", prompt_ids=[1], max_tokens=99_000)
        ):
            print(event.WhichOneof("event"), flush=True)
"""


@pytest.mark.slow
async def test_a_frozen_client_loses_its_generation(rig):
    """The client's process is stopped, its connection stays open: only unanswered pings tell."""
    rig.runner.delay_s = 0.05  # far below what would fill the socket's buffers
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(CLIENT), f"unix:{rig.path}", stdout=asyncio.subprocess.PIPE
    )
    try:
        while await client.stdout.readline() != b"tokens\n":
            pass
        client.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            await rig.free()
        assert rig.engine.status().counters.cancelled == 1
        assert rig.engine.status().counters.generated_tokens < 1000
    finally:
        client.kill()
        await client.wait()
        client._transport.close()


async def test_a_reader_that_stops_loses_its_stream_and_memory_stays_bounded(rig, monkeypatch):
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.2)
    channel = grpc.aio.insecure_channel(
        f"unix:{rig.path}",
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)],
    )
    try:
        call = rpc.LaneStub(channel).Generate(message(max_tokens=99_000))
        await call.read()
        await rig.free()
        status = rig.engine.status()
        assert status.counters.failed + status.counters.cancelled == 1
        assert status.counters.generated_tokens < 20_000  # what sockets and the outbox hold, not what was asked for
        assert len(ids(await rig.ask())) == 4
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(await call.trailing_metadata())["expressway-error-code"] == "slow_reader"
    finally:
        await channel.close()


async def test_watch_tells_every_change_and_gives_signs_of_life(rig):
    call = rig.stub.Watch(pb.WatchRequest())
    assert (await call.read()).state == pb.LANE_STATE_READY
    gate = rig.hold()
    stream = asyncio.create_task(rig.ask(request_id="r9"))
    while (status := await call.read()).state != pb.LANE_STATE_BUSY:
        pass
    assert status.active_request_id == "r9"
    again = await call.read()  # nothing changed: the sign of life
    assert again.stamp_ns > status.stamp_ns
    gate.set()
    await stream
    while (status := await call.read()).state != pb.LANE_STATE_READY:
        pass
    assert (status.counters.requests, status.counters.generated_tokens) == (1, 4)
    assert status.active_request_id == ""
    call.cancel()


async def test_drain_finishes_refuses_and_tells(rig):
    checks = health_pb2_grpc.HealthStub(rig.channel)
    assert (await checks.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    gate = rig.hold()
    stream = asyncio.create_task(rig.ask())
    await asyncio.to_thread(rig.runner.entered.acquire)
    await rig.stub.Drain(pb.DrainRequest())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.ask(request_id="r2")
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert code_of(error) == "draining"
    assert (await checks.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    idle = asyncio.create_task(rig.server.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    gate.set()
    assert (await stream)[-1].finished.reason == pb.FINISH_REASON_LENGTH
    await asyncio.wait_for(idle, 20)
    assert rig.server.draining.is_set()


async def test_nan_is_told_before_the_process_may_end(rig):
    rig.runner.poison_at = 6
    events = await rig.ask(max_tokens=50)
    end = events[-1].finished
    assert (end.reason, end.error_code) == (pb.FINISH_REASON_ERROR, "non_finite_logits")
    assert len(ids(events)) == end.usage.completion_tokens == 2
    await asyncio.wait_for(rig.server.fatal.wait(), 20)
    await asyncio.wait_for(rig.server.idle(), 20)
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.ask()


async def test_message_size_limit(rig):
    just = message(prompt_ids=[1] * (limits.MAX_RECEIVE_BYTES - 100))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.stub.Generate(just).read()
    assert code_of(error) == "context_length_exceeded"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rig.stub.Generate(message(prompt_ids=[1] * (limits.MAX_RECEIVE_BYTES + 1))).read()
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert code_of(error) is None


async def test_socket_and_directory_modes(rig):
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(rig.path.parent.stat().st_mode) == 0o700


def test_socket_path_refusals(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(StartError, match="0700"):
        prepare_socket(open_folder / "x.sock")
    private = tmp_path / "private"
    prepare_socket(private / "x.sock")
    (private / "file").write_text("precious")
    with pytest.raises(StartError, match="no socket"):
        prepare_socket(private / "file")
    assert (private / "file").read_text() == "precious"
    (private / "link").symlink_to(private / "file")
    with pytest.raises(StartError, match="no socket"):
        prepare_socket(private / "link")


async def test_a_dead_lanes_socket_is_replaced_a_living_ones_is_not(tmp_path):
    path = tmp_path / "run" / "lane-0.sock"
    prepare_socket(path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
        with pytest.raises(StartError, match="living"):
            prepare_socket(path)
    assert path.is_socket()
    async with Rig(tmp_path) as rig:
        assert kinds(await rig.ask())[-1] == "finished"
        with pytest.raises(StartError, match="living"):
            prepare_socket(path)


async def test_watch_shows_a_step_that_stands_still(rig):
    gate = rig.hold()
    answer = asyncio.create_task(rig.ask(max_tokens=2))
    seen = []
    async for status in rig.stub.Watch(pb.WatchRequest()):
        seen.append(status)
        if len(seen) >= 2 and all(each.step.kind == pb.STEP_KIND_PREFILL for each in seen[-2:]):
            break
    before, status = seen[-2:]
    assert status.state == pb.LANE_STATE_BUSY
    assert status.stamp_ns > before.stamp_ns
    assert status.step.progress_ns == before.step.progress_ns < status.stamp_ns
    gate.set()
    assert kinds(await answer)[-1] == "finished"
    hello = await rig.stub.Hello(pb.HelloRequest(protocol_version=1))
    assert not hello.status.HasField("step")
    times = {each.kind: each for each in hello.status.step_times}
    assert times[pb.STEP_KIND_PREFILL].count == 2  # five tokens in chunks of four
    assert times[pb.STEP_KIND_DECODE].p99_ns > 0
