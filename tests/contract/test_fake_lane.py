"""The simulated lane keeps the contract of a real one, and its faults are what they say."""

import asyncio

import grpc
import pytest

from laneproto.v1 import lane_pb2 as pb
from laneproto.v1 import lane_pb2_grpc as rpc
from tests.fakes.lane import FakeLane, Script, token_at


def message(**changes):
    return pb.GenerateRequest(**({"request_id": "r1", "prompt_ids": [1, 2, 3], "max_tokens": 5} | changes))


async def ask(lane, **changes):
    async with grpc.aio.insecure_channel(lane.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return [event async for event in rpc.LaneStub(channel).Generate(message(**changes))]


def ids(events):
    return [token.id for event in events for token in event.tokens.tokens]


async def test_stream_order_tokens_and_stop(tmp_path):
    async with FakeLane(tmp_path / "l.sock", script=Script(chunk_tokens=2)) as lane:
        events = await ask(lane)
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["accepted", "tokens", "tokens", "tokens", "finished"]
        answer = [token_at([1, 2, 3], i) for i in range(5)]
        assert ids(events) == answer
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
        stopped = await ask(lane, stop_ids=[answer[2]])
        assert ids(stopped) == answer[:3]
        assert stopped[-1].finished.reason == pb.FINISH_REASON_STOP
        assert not lane.busy


async def test_busy_cancel_and_drain(tmp_path):
    async with FakeLane(tmp_path / "l.sock", script=Script(token_delay_s=60)) as lane:
        first = asyncio.create_task(ask(lane))
        while not lane.busy:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(lane, request_id="r2")
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with grpc.aio.insecure_channel(lane.address) as channel:
            stub = rpc.LaneStub(channel)
            await stub.Drain(pb.DrainRequest())
            assert (await stub.Cancel(pb.CancelRequest(request_id="r1"))).found
        assert (await first)[-1].finished.reason == pb.FINISH_REASON_CANCELLED
        await asyncio.wait_for(lane.wait_drained(), 10)


@pytest.mark.parametrize("fault", ["crash", "break", "error", "hang"])
async def test_faults_strike_after_the_tokens_they_name(tmp_path, fault):
    lane = await FakeLane(tmp_path / "l.sock", script=Script(fault=fault, fault_after=2)).start()
    seen, outcome = [], "finished"
    async with grpc.aio.insecure_channel(lane.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = rpc.LaneStub(channel).Generate(message())
        try:
            async with asyncio.timeout(0.5 if fault == "hang" else 20):
                async for event in call:
                    seen.append(event)
        except TimeoutError:
            outcome = "silence"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
    assert outcome == {"crash": "UNAVAILABLE", "break": "INTERNAL", "error": "finished", "hang": "silence"}[fault]
    assert len(ids(seen)) == 2
    if fault == "error":
        assert seen[-1].finished.error_code == "non_finite_logits"
    await lane.stop()


async def test_restart_is_a_new_incarnation(tmp_path):
    async with FakeLane(tmp_path / "l.sock") as lane:
        before = lane.incarnation
        await ask(lane)
        await lane.restart()
        assert lane.incarnation != before
        assert lane.counters.requests == 0
        assert len(ids(await ask(lane))) == 5


@pytest.mark.parametrize("script", [Script(), Script(tokens=(9, 8, 7, 6))])
async def test_a_replay_is_the_rest_of_the_answer(tmp_path, script):
    async with FakeLane(tmp_path / "l.sock", script=script) as lane:
        whole = await ask(lane)
        rest = await ask(lane, prompt_ids=[1, 2, 3, *ids(whole)[:2]], replayed_tokens=2)
        assert ids(rest) == ids(whole)[2:]
        assert rest[-1].finished.usage == whole[-1].finished.usage
        assert rest[-1].finished.reason == whole[-1].finished.reason


async def test_prefixes_are_a_snapshot_and_then_what_changes(tmp_path):
    async with FakeLane(tmp_path / "l.sock") as lane, grpc.aio.insecure_channel(lane.address) as channel:
        lane.tell_prefix(b"a" * 16, 64, pb.PREFIX_PLACE_LIVE)
        call = rpc.LaneStub(channel).Prefixes(pb.PrefixesRequest())
        first = await call.read()
        assert (first.sequence, first.snapshot, first.complete) == (1, True, True)
        assert [p.tokens for p in first.added] == [64]
        lane.tell_prefix(b"a" * 16, 64, None)
        second = await call.read()
        assert (second.sequence, second.snapshot, [p.chain for p in second.removed]) == (2, False, [b"a" * 16])
        call.cancel()
