"""Lanes that are killed, drained, poisoned or orphaned: real processes on a tiny pack."""

import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from laneproto.v1 import lane_pb2 as pb
from shared_experts import golden
from shared_experts.manifest import encode, finished
from shared_experts.pack import Pack
from tests.fakes.processes import Host, collect, message, tiny_pack

pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path):
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        yield host


def poison(pack, name, row):
    """Writes NaN over a row of a dense fp32 tensor; a lane itself reads no digest of them."""
    with Pack.open(pack) as opened:
        info = opened.dense().tensors[name]
    with (pack / "dense.safetensors").open("r+b") as file:
        width = info.bytes // info.shape[0]
        file.seek(info.offset + row * width)
        file.write(b"\xff" * width)


def test_a_killed_lane_is_ready_again_without_expert_bytes_and_its_neighbour_streams_on(host):
    owner = host.owner()
    steady = "--drafts", "0"  # which rows share a window follows measured times, and moves last bits
    host.ready_lane("lane-0", *steady)
    victim = host.ready_lane("lane-1", *steady)
    long = {"max_tokens": 400}
    truth, _ = host.ask("lane-0", **long)
    # From here on the file of experts is garbage: whoever reads it cannot answer as before.
    experts = Path(host.pack, "experts.bin")
    experts.write_bytes(os.urandom(experts.stat().st_size))

    with host.stub("lane-0") as stub, host.stub("lane-1") as dying:
        streaming = stub.Generate(message(**long))
        first = [next(streaming), next(streaming)]
        broken = dying.Generate(message(max_tokens=30_000))
        next(broken)
        victim.kill()
        with pytest.raises(grpc.RpcError) as error:
            list(broken)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        log = host.ready_lane("lane-1", *steady).text()
        rest = list(streaming)
    ids, end = collect(iter(first + rest))
    assert ids == truth
    assert end.reason == pb.FINISH_REASON_LENGTH
    assert '"region_attached"' in log
    again, end = host.ask("lane-1", **long)
    assert again == truth
    assert end.counters.expert_hits > 0
    assert owner.popen.poll() is None


def test_sigterm_finishes_the_running_answer_and_exits_0(host):
    host.owner()
    lane = host.ready_lane()
    with host.stub() as stub:
        stream = stub.Generate(message(max_tokens=300))
        events = [next(stream), next(stream)]
        lane.popen.send_signal(signal.SIGTERM)
        lane.until("lane_draining")
        with pytest.raises(grpc.RpcError) as error, host.stub() as other:
            list(other.Generate(message(request_id="r2")))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        ids, end = collect(iter(events + list(stream)))
    assert len(ids) == 300
    assert end.reason == pb.FINISH_REASON_LENGTH
    assert lane.wait() == 0
    assert list(host.run.glob("lane-0*")) == []


def test_the_drain_call_ends_an_idle_lane_with_0(host):
    host.owner()
    lane = host.ready_lane()
    with host.stub() as stub:
        stub.Drain(pb.DrainRequest())
    assert lane.wait() == 0


def test_nan_ends_the_stream_with_its_code_and_the_process_with_70(host):
    host.owner()
    poison(host.pack, "model.embed_tokens.weight", 77)
    lane = host.ready_lane()
    assert len(host.ask()[0]) == 16
    ids, end = host.ask(prompt_ids=[5, 77, 11])
    assert (ids, end.reason, end.error_code) == ([], pb.FINISH_REASON_ERROR, "non_finite_logits")
    assert lane.wait() == 70


def test_a_poisoned_model_is_never_ready(host):
    host.owner()
    poison(host.pack, "model.embed_tokens.weight", 0)
    lane = host.lane()
    assert lane.wait() == 65
    assert '"code": "self_test_failed"' in lane.text()
    assert "error: self_test_failed: the model's logits are not finite" in lane.text()
    assert "lane_ready" not in lane.text()


def test_a_region_that_was_forged_together_with_its_digests_is_never_served(host):
    """One bit of an expert, with every digest of the pack and the region made right again."""
    fingerprint = Pack.open(host.pack).fingerprint
    golden.make(host.pack, fingerprint, pytest.fail)
    record = golden.read(host.pack, fingerprint)
    forge(host.pack, record.experts[1])
    forged = Pack.open(host.pack)
    forged.verify()
    record = replace(record, fingerprint=forged.fingerprint.hex())
    (host.pack / golden.FILE_NAME).write_bytes(golden.encode(record))
    host.owner()
    lane = host.lane()
    assert lane.wait() == 65
    assert "error: self_test_failed: expert 8 of layer 1 answers other bits than were recorded" in lane.text()
    assert "lane_ready" not in lane.text()


def forge(pack, one):
    """Turns one bit of an expert's record around, then repairs the section's digest and the fingerprint."""
    with Pack.open(pack) as opened:
        manifest = opened.manifest
    section = next(s for s in manifest.sections if s.name == f"experts.{one.layer}")
    data = bytearray((pack / section.file).read_bytes())
    data[section.offset + one.expert * manifest.experts.record_bytes + manifest.experts.layout.down_scales] ^= 1
    (pack / section.file).write_bytes(data)
    digest = hashlib.sha256(data[section.offset : section.offset + section.bytes]).digest()
    sections = tuple(replace(s, sha256=digest) if s == section else s for s in manifest.sections)
    (pack / "manifest.msgpack").write_bytes(encode(finished(replace(manifest, sections=sections))))


def test_lanes_outlive_the_owner_and_the_next_owner_adopts(host):
    owner = host.owner()
    host.ready_lane()
    truth, _ = host.ask()
    owner.kill()
    assert host.ask()[0] == truth
    experts = Path(host.pack, "experts.bin")
    experts.write_bytes(os.urandom(experts.stat().st_size))
    log = host.owner().until("owner_ready")
    assert "adopted=True" in log
    host.ready_lane("lane-1")
    assert host.ask("lane-1")[0] == truth


def test_another_packs_region_is_refused(host, tmp_path):
    host.owner()
    lane = host.lane(pack=tiny_pack(tmp_path, "f32"))
    assert lane.wait() == 65
    assert '"code": "region_mismatch"' in lane.text()


def test_refusals_have_an_exit_code_and_a_reason(host):
    missing = host.lane(pack=host.folder / "none.pack")
    assert missing.wait() == 65
    assert '"lane_start_failed"' in missing.text()
    wrong = host.lane("lane-1", "--prefill-chunk", "0")
    assert wrong.wait() == 64
    assert "error: bad_config: --prefill-chunk" in wrong.text()


def test_a_lane_keeps_to_itself(host):
    """No core files, nothing listens but its two sockets, and they are the user's alone."""
    host.owner()
    lane = host.ready_lane()
    proc = Path(f"/proc/{lane.popen.pid}")
    core = next(line for line in (proc / "limits").read_text().splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    inodes = {os.readlink(fd) for fd in (proc / "fd").iterdir() if os.path.lexists(fd)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in (proc / "net" / table).read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes
    for name in ("lane-0.sock", "lane-0.region.sock"):
        assert (host.run / name).stat().st_mode & 0o777 == 0o600
