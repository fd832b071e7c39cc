"""Messages of other processes: hand-off, region header, and both Generate requests."""

import array
import os
import socket
import threading
import zlib
from dataclasses import replace

import msgpack
from hypothesis import strategies as st

from coordinator.errors import RequestError as DoorRequestError
from coordinator.fleet.lane_view import ModelView
from coordinator.sampling import Defaults, Wanted, check_sampling
from laneproto.v1 import lane_pb2
from lanes import limits as lane_limits
from lanes.errors import LaneError
from lanes.request import Bounds, parse
from shared_experts import handoff
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import HandoffError, RegionError, RegionMismatch
from shared_experts.handoff import RegionStatus
from shared_experts.layout import REGION_HEADER_BYTES, REGION_STATE_OFFSET
from shared_experts.region import READY_WORD, RegionHeader, check_descriptor
from tests.fakes import regions
from tests.fakes.descriptors import held
from tests.fuzz.inputs import MSGPACK_VALUES, either, spoilt
from tests.fuzz.loop import fuzz

READY = RegionStatus("ready", "built", 100, 100, regions.manifest().fingerprint, b"g" * 16, os.getpid())


def test_handoff_request():
    def check(data):
        want = handoff.decode_request(data)
        assert want in handoff.WANTS

    good = msgpack.unpackb(handoff.encode_request("descriptor"))
    fuzz(either(good, MSGPACK_VALUES, msgpack.packb, [handoff.encode_request("status")]), check, (HandoffError,))


def test_handoff_reply():
    def check(data):
        status = handoff.decode_status(data)
        assert handoff.decode_status(handoff.encode_status(status)) == status

    good = msgpack.unpackb(handoff.encode_status(READY))
    more = [handoff.encode_refusal("no"), handoff.encode_status(replace(READY, state="filling", done_bytes=3))]
    fuzz(either(good, MSGPACK_VALUES, msgpack.packb, more), check, (HandoffError,))


def test_owner_receives(tmp_path):
    """Whatever a client sends: a reply of the protocol or nothing, no descriptor unasked, the next is served."""
    path = tmp_path / "owner.sock"
    region = regions.build(tmp_path)
    good = msgpack.unpackb(handoff.encode_request("descriptor"))

    def check(data):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(10)
            client.connect(str(path))
            client.send(data)
            message, descriptors = handoff.receive(client)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            asked = handoff.decode_request(data)
        except HandoffError:
            assert not descriptors, "a bad request is lent nothing"
            assert not message or set(msgpack.unpackb(message)) == {"v", "refused"}
            raise
        assert len(descriptors) == (asked == "descriptor")
        assert handoff.decode_status(message) == READY

    try:
        with DescriptorServer(path, lambda: (READY, region.fd)):
            inputs = either(good, MSGPACK_VALUES, msgpack.packb, [handoff.encode_request("status")])
            fuzz(inputs.filter(lambda data: 0 < len(data) < 100_000), check, (HandoffError,))
            assert handoff.ask(path, "status", timeout_s=10) == (READY, None)
    finally:
        os.close(region.fd)


def test_lane_receives(tmp_path):
    """Whatever an owner answers, with whatever descriptors: a status or a typed error, and no descriptor is left."""
    path = tmp_path / "rogue.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(8)
    reply: list[tuple[bytes, int]] = []
    lent = os.open(tmp_path, os.O_RDONLY)

    def serve():
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                if not reply:
                    return
                data, count = reply.pop()
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lent] * count))] if count else []
                connection.sendmsg([data], rights)

    thread = threading.Thread(target=serve)
    thread.start()

    def check(value):
        reply.append(value)
        try:
            status, descriptor = handoff.ask(path, "descriptor", timeout_s=10)
            assert (descriptor is not None) == (status.state == "ready")
            if descriptor is not None:
                os.close(descriptor)
        finally:
            assert held(tmp_path) == [str(tmp_path)], "a lent descriptor was left open"

    good = msgpack.unpackb(handoff.encode_status(READY))
    filling = handoff.encode_status(replace(READY, state="filling", done_bytes=3))
    messages = either(good, MSGPACK_VALUES, msgpack.packb, [filling]).filter(lambda data: 0 < len(data) < 100_000)
    try:
        fuzz(st.tuples(messages, st.sampled_from([0, 1, 1, 1, 2, 4, 6])), check, (RegionError,))
    finally:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            reply.clear()
            last.connect(str(path))
            last.send(b"end")
        thread.join()
        listener.close()
        os.close(lent)


def _header_page(tmp_path):
    region = regions.build(tmp_path)
    try:
        return os.pread(region.fd, REGION_HEADER_BYTES, 0)
    finally:
        os.close(region.fd)


def test_region_header(tmp_path):
    """Spoilt as it is, and with the checksum made good again."""
    page = _header_page(tmp_path)
    body = page[:128]

    def check(data):
        header = RegionHeader.decode(data)
        assert header.encode()[:128] == data[:128]

    def signed(data):
        text = data[:120].ljust(120, b"\0")
        return (text + zlib.crc32(text).to_bytes(4, "little") + bytes(4)).ljust(REGION_STATE_OFFSET, b"\0") + READY_WORD

    fuzz(spoilt([page]) | spoilt([body]).map(signed), check, (RegionMismatch,))


def test_region_descriptor(tmp_path):
    """Only the header of the region that was asked for is accepted, whatever a sealed file says."""
    page, shape = _header_page(tmp_path), regions.shape()

    def check(data):
        fd = regions.forged(data[:REGION_HEADER_BYTES], size=shape.total_bytes)
        try:
            header = check_descriptor(fd, shape)
            assert (header.fingerprint, header.total_bytes) == (shape.fingerprint, shape.total_bytes)
        finally:
            os.close(fd)

    fuzz(spoilt([page]), check, (RegionMismatch,))


BOUNDS = Bounds(vocab_size=300, context_tokens=64)
NUMBERS = st.sampled_from([0, 1, 2, 63, 64, 65, 299, 300, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)
REALS = st.sampled_from([0.0, -0.0, 1.0, -2.0, 2.0, 2.5, 1e-45, 100.0, 101.0]) | st.floats(width=32)
IDS = st.lists(st.integers(0, 310), max_size=70)


def _sampling(kind):
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return st.fixed_dictionaries(
        {}, optional={**dict.fromkeys(names, REALS), "top_k": NUMBERS, "min_tokens": NUMBERS,
                      "seed": st.integers(0, (1 << 64) - 1), "logit_bias": st.dictionaries(NUMBERS, REALS, max_size=4)},
    ).map(lambda fields: kind(**fields))  # fmt: skip


def test_lane_generate():
    """A lane checks its coordinator's requests too."""
    message = st.fixed_dictionaries(
        {"request_id": st.just("r") | st.text(max_size=70), "prompt_ids": st.just([5, 6]) | IDS, "max_tokens": NUMBERS},
        optional={"sampling": _sampling(lane_pb2.Sampling), "stop_ids": IDS, "logprobs": st.booleans(),
                  "top_logprobs": NUMBERS, "replayed_tokens": NUMBERS},
    ).map(lambda fields: lane_pb2.GenerateRequest(**fields).SerializeToString())  # fmt: skip
    good = lane_pb2.GenerateRequest(
        request_id="r-1", prompt_ids=[5, 6, 7], max_tokens=4, stop_ids=[2], logprobs=True, top_logprobs=3,
        sampling=lane_pb2.Sampling(temperature=0.5, top_p=0.9, seed=9, logit_bias={3: 1.5}),
    )  # fmt: skip

    class Undecodable(Exception):
        pass

    def check(data):
        try:
            asked = lane_pb2.GenerateRequest.FromString(data)
        except Exception as error:  # gRPC answers such bytes itself
            raise Undecodable("no message") from error
        request = parse(asked, BOUNDS)
        sampling = request.sampling
        assert request.prompt_ids
        assert len(request.prompt_ids) + request.new_tokens <= BOUNDS.context_tokens
        assert request.new_tokens >= 1
        assert max([*request.prompt_ids, *request.stop_ids, *(i for i, _ in sampling.logit_bias)]) < BOUNDS.vocab_size
        assert 0 <= sampling.temperature <= lane_limits.MAX_TEMPERATURE
        assert 0 < sampling.top_p <= 1
        assert 0 < sampling.repetition_penalty <= lane_limits.MAX_REPETITION_PENALTY
        assert all(abs(bias) <= lane_limits.MAX_BIAS for _, bias in sampling.logit_bias)
        assert len(request.request_id) <= lane_limits.MAX_REQUEST_ID_CHARACTERS

    fuzz(message | spoilt([good.SerializeToString()]), check, (LaneError, Undecodable))


def test_sampling_of_the_doors():
    """What a door accepts, a lane accepts: the coordinator's checks are never the looser ones."""
    model = ModelView("m", "a", b"f", BOUNDS.vocab_size, BOUNDS.context_tokens, (), "f32", 0, 63)
    reals = st.none() | REALS | st.floats()
    whole = st.none() | NUMBERS | st.integers(-(1 << 65), 1 << 65)
    wanted = st.builds(
        Wanted, temperature=reals, top_k=whole, top_p=reals, min_p=reals, seed=whole, repetition_penalty=reals,
        presence_penalty=reals, frequency_penalty=reals, min_tokens=st.none() | st.integers(-1, 20),
        logit_bias=st.dictionaries(st.integers(-1, 310), REALS, max_size=3),
    ) | st.builds(Wanted, temperature=reals, top_k=whole)  # fmt: skip

    def check(value):
        sampling = check_sampling(value, Defaults(1.0), default_seed=7, max_tokens=16, model=model)
        asked = lane_pb2.GenerateRequest(
            request_id="r", prompt_ids=[1], max_tokens=16, sampling=sampling.to_wire(), stop_ids=[2]
        )
        parse(lane_pb2.GenerateRequest.FromString(asked.SerializeToString()), BOUNDS)

    fuzz(wanted, check, (DoorRequestError,))
