"""Too many lanes for a host's memory are refused before a process starts, with numbers."""

from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.errors import BadOption
from coordinator.host import room
from coordinator.host.lane_options import LaneOptions
from coordinator.host.room import Free, check_one_more, check_room, lane_bytes
from coordinator.pack_facts import PackFacts
from coordinator.sizing import PROCESS_BYTES
from tests.fakes.processes import tiny_pack

MIB, GIB = 1 << 20, 1 << 30
FACTS = PackFacts(None, None, 1 << 20, region_bytes=4 * GIB, dense_fp32_bytes=GIB, embedding_bytes=100 * MIB)
CPU = LaneOptions(Path("/packs/one"), "cpu", 256 * MIB)
LANE = PROCESS_BYTES + GIB + 256 * MIB


def test_what_is_needed_to_the_byte():
    need = 4 * GIB + 3 * LANE
    check_room(FACTS, CPU, 3, Free(need))
    with pytest.raises(BadOption) as refused:
        check_room(FACTS, CPU, 3, Free(need - 1))
    assert refused.value.message == (
        "--lanes: 3 x 1.592 GiB (process 350 MiB, dense weights in fp32 1 GiB, expert cache 256 MiB) beside the region "
        "of 4 GiB are 8.775 GiB of memory, and 8.775 GiB are free; 2 fit"
    )


def test_a_lane_that_is_added_needs_its_own_room_alone():
    check_one_more(FACTS, CPU, Free(LANE))
    check_one_more(FACTS, CPU, Free(None))
    with pytest.raises(
        BadOption, match=r"one more lane takes 1\.592 GiB \(process 350 MiB, .*\), and 1\.592 GiB are free"
    ):
        check_one_more(FACTS, CPU, Free(LANE - 1))


def test_not_even_one():
    with pytest.raises(BadOption, match="none fits: a smaller --vram-budget"):
        check_room(FACTS, CPU, 1, Free(GIB))


def test_a_region_in_reserved_huge_pages_takes_nothing_more():
    check_room(FACTS, CPU, 1, Free(LANE, huge_pages=2048))
    with pytest.raises(BadOption):
        check_room(FACTS, CPU, 1, Free(LANE, huge_pages=2047))


def test_a_gpu_lane_has_its_weights_and_cache_in_vram():
    gpu = LaneOptions(Path("/packs/one"), "cuda", 16 * GIB, state_budget_bytes=2 * GIB)
    assert sum(lane_bytes(FACTS, gpu).values()) == PROCESS_BYTES + 100 * MIB + 2 * GIB


def test_a_cache_holds_no_more_than_there_is():
    assert lane_bytes(FACTS, LaneOptions(Path("/packs/one"), "cpu", 16 * GIB))["expert cache"] == 4 * GIB


def test_what_is_not_known_refuses_nothing():
    check_room(FACTS, CPU, 200, Free(None))
    check_room(PackFacts(None, None, 1), CPU, 1, Free(GIB))


def test_what_this_host_has(tmp_path, monkeypatch):
    assert room.free_here().bytes
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1024 kB\n")
    (tmp_path / "pages").write_text("7\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "FREE_HUGE_PAGES", tmp_path / "pages")
    assert room.free_here() == Free(MIB, 7)
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(room, "FREE_HUGE_PAGES", tmp_path / "none")
    assert room.free_here() == Free(None)


def test_serve_says_so_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("coordinator.cli.serve.configure_logging", lambda **_: None)  # of this whole process
    monkeypatch.setattr("coordinator.cli.serve.free_here", lambda: Free(4 * GIB))
    monkeypatch.setattr("coordinator.cli.serve.run_cluster", lambda *_: pytest.fail("it started"))
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_pack(tmp_path)), "--lanes", "200"])
    assert ended.value.code
    said = capsys.readouterr().err
    assert said.startswith("error: bad_option: --lanes: 200 x ")
    assert "4 GiB are free; 11 fit" in said
