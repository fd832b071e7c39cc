"""Attaching: what a lane sees, what it waits for, what it refuses, and what it leaves behind (nothing)."""

import ctypes
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shared_experts.attach import attach, attach_descriptor
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import RegionMismatch, RegionUnavailable
from shared_experts.handoff import RegionStatus
from shared_experts.layout import F32, RecordLayout
from shared_experts.owner import Owner, OwnerConfig
from shared_experts.region import READY_WORD, RegionHeader
from tests.fakes import regions

MANIFEST = regions.manifest()


@pytest.fixture
def served(tmp_path):
    """The path of an owner's socket; the owner runs in this process."""
    (tmp_path / "run").mkdir(mode=0o700)
    path = regions.write_experts(tmp_path / "experts.bin")
    owner = Owner(OwnerConfig(tmp_path / "run", path, regions.shape(), threads=2, huge_pages=False))
    thread = threading.Thread(target=owner.run)
    thread.start()
    regions.wait_ready(tmp_path / "run" / "owner.sock")
    yield tmp_path / "run" / "owner.sock"
    owner.stop()
    thread.join()


def test_a_lane_reads_every_record_in_place(served):
    record = RecordLayout.of(F32, regions.HIDDEN, regions.INTERMEDIATE).record_bytes
    data = regions.records()
    with attach(served, MANIFEST, 5.0) as region:
        for layer in range(regions.LAYERS):
            for expert in range(regions.EXPERTS):
                start = (layer * regions.EXPERTS + expert) * record
                assert region.record(layer, expert) == data[start : start + record]
                address = region.record_address(layer, expert)
                assert address % 4096 == 0
                assert ctypes.string_at(address, record) == data[start : start + record]
        for bad in ((-1, 0), (0, -1), (regions.LAYERS, 0), (0, regions.EXPERTS)):
            with pytest.raises(IndexError):
                region.record_address(*bad)
        assert region.view.readonly
        assert region.header.fingerprint == MANIFEST.fingerprint


def test_attaching_touches_no_record(tmp_path):
    size = 64 << 20
    shape = replace(regions.shape(), layers=1, experts=1, record_bytes=size, layer_sha256=(b"",))
    content = (RegionHeader.of(shape, bytes(16), os.getpid()).encode() + READY_WORD).ljust(4096, b"\0")
    region = attach_descriptor(regions.forged(content, size=shape.total_bytes), shape)
    smaps = Path("/proc/self/smaps").read_text()
    entry = re.search(r"^[0-9a-f]+-[0-9a-f]+ r--s .*memfd:forged.*\n(?:\w+:.*\n)*", smaps, re.M)
    assert int(re.search(r"^Size:\s+(\d+) kB", entry[0], re.M)[1]) << 10 == shape.total_bytes
    assert int(re.search(r"^Rss:\s+(\d+) kB", entry[0], re.M)[1]) == 0
    region.close()


def test_two_hundred_attachments_leave_no_descriptor_and_no_map(served):
    attach(served, MANIFEST, 5.0).close()
    before = regions.open_descriptors()
    for _ in range(200):
        region = attach(served, MANIFEST, 5.0)
        assert region.fd >= 0
        region.close()
        region.close()  # harmless
    assert regions.open_descriptors() == before
    assert "expressway-experts" not in Path("/proc/self/maps").read_text()


def test_refused_attachments_leave_no_descriptor(served):
    other = replace(MANIFEST, fingerprint=b"\1" * 32)
    before = regions.open_descriptors()
    for _ in range(20):
        with pytest.raises(RegionMismatch) as caught:
            attach(served, other, 5.0)
        assert caught.value.check == "fingerprint"
    assert regions.open_descriptors() == before


def test_a_lane_lends_what_it_holds_and_the_copy_outlives_its_source(served, tmp_path):
    first = attach(served, MANIFEST, 5.0)
    with first.lend(tmp_path / "lane-0.region.sock"):
        second = attach(tmp_path / "lane-0.region.sock", MANIFEST, 5.0)
    first.close()
    assert second.generation == second.header.generation
    assert bytes(second.view[4096 : second.header.total_bytes]) == regions.records()
    second.close()


def status(state: str, done: int, fingerprint: bytes = MANIFEST.fingerprint) -> RegionStatus:
    return RegionStatus(state, "", done, 100, fingerprint, bytes(16), os.getpid())


def test_a_lane_waits_with_a_reason_until_the_region_is_there(tmp_path):
    built = regions.build(tmp_path)
    ready = replace(status("ready", 100), source="built", generation=built.header.generation)
    answers = [(status("adopting", 0), None), (status("filling", 7), None), (status("filling", 70), None)]
    heard = []

    def answer():
        return answers.pop(0) if answers else (ready, built.fd)

    def later():
        time.sleep(0.2)
        server.start()

    server = DescriptorServer(tmp_path / "owner.sock", answer)
    starter = threading.Thread(target=later)
    starter.start()
    region = attach(tmp_path / "owner.sock", MANIFEST, 30.0, on_wait=heard.append)
    starter.join()
    assert "No such file" in heard[0]
    assert [re.search(r"(adopting|filling) \d+ %", h)[0] for h in heard[1:]] == [
        "adopting 0 %", "filling 7 %", "filling 70 %",
    ]  # fmt: skip
    region.close()
    server.close()
    os.close(built.fd)


def test_waiting_ends(tmp_path):
    with pytest.raises(RegionUnavailable, match="No such file") as caught:
        attach(tmp_path / "owner.sock", MANIFEST, 0.1)
    assert caught.value.retryable
    with (
        DescriptorServer(tmp_path / "owner.sock", lambda: (status("filling", 35), None)),
        pytest.raises(RegionUnavailable, match="filling 35 %"),
    ):
        attach(tmp_path / "owner.sock", MANIFEST, 0.1)


def test_an_owner_of_another_pack_is_not_waited_for(tmp_path):
    with (
        DescriptorServer(tmp_path / "owner.sock", lambda: (status("filling", 35, b"\2" * 32), None)),
        pytest.raises(RegionMismatch) as caught,
    ):
        attach(tmp_path / "owner.sock", MANIFEST, 60.0)
    assert caught.value.check == "fingerprint"


def test_generation_of_message_and_header_must_agree(tmp_path):
    built = regions.build(tmp_path)
    lie = replace(status("ready", 100), source="built", generation=b"\3" * 16)
    with (
        DescriptorServer(tmp_path / "owner.sock", lambda: (lie, built.fd)),
        pytest.raises(RegionMismatch) as caught,
    ):
        attach(tmp_path / "owner.sock", MANIFEST, 5.0)
    assert caught.value.check == "generation"
    os.close(built.fd)
