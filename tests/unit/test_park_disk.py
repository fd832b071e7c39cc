"""Parked conversations on disk: whole or not there, ours or skipped, bounded; and back in the pool after a restart."""

import os
import time

import numpy as np
import pytest
import xxhash

from lanes import limits as lane_limits
from shared_experts.errors import ParkRefused
from shared_experts.park_disk import ParkDisk, Saved, longer_form
from shared_experts.park_index import Mark
from shared_experts.park_server import ParkServer
from tests.unit.test_conversations import turn
from tests.unit.test_parking import SEGMENT, ids, lane_on, settle

F = b"f" * 32


def saved_of(*datas, tenant=b"t" * 16, tokens=100):
    parts = tuple((xxhash.xxh3_128_digest(data), len(data)) for data in datas)
    return Saved(tenant, len(datas) - 2, (Mark(tokens, b"c" * 16, 1),), parts)


def put(disk, *datas, **more):
    saved = saved_of(*datas, **more)
    disk.save(saved, lambda part: np.frombuffer(datas[part], np.uint8))
    return saved


def everything(disk):
    return [(saved, [part.tobytes() for part in parts]) for saved, parts in disk.load()]


@pytest.fixture
def disk(tmp_path):
    return ParkDisk(tmp_path / "park", F, 1 << 20)


def test_what_was_saved_is_loaded(disk):
    datas = (b"page one", b"page two", b"checkpoint", b"header")
    saved = put(disk, *datas)
    assert everything(disk) == [(saved, list(datas))]
    (file,) = disk.folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert disk.folder.stat().st_mode & 0o777 == 0o700


def test_another_packs_files_and_strange_ones_are_left_alone(disk, tmp_path):
    put(ParkDisk(disk.folder, b"g" * 32, 1 << 20), b"p", b"c", b"h")
    (disk.folder / "strange.park").write_bytes(b"x" * 200)
    (disk.folder / "link.park").symlink_to(tmp_path / "nowhere")
    assert everything(disk) == []
    assert (disk.folder / "strange.park").exists()


def test_what_is_no_plain_file_neither_stops_nor_fails_a_start(disk, tmp_path):
    (tmp_path / "other").write_bytes(b"somebody's")
    os.mkfifo(disk.folder / "a.park")
    (disk.folder / "b.park").mkdir()
    (disk.folder / "c.park").symlink_to(tmp_path / "other")
    small = ParkDisk(disk.folder, F, 1)  # so small that all that counts must go
    assert everything(small) == []
    assert len(list(disk.folder.iterdir())) == 3
    assert (tmp_path / "other").read_bytes() == b"somebody's"


def test_a_file_that_is_damaged_anywhere_is_refused_and_removed(disk):
    datas = (os.urandom(50), os.urandom(20), os.urandom(30))
    saved = put(disk, *datas)
    path = disk.folder / saved.name
    good = path.read_bytes()
    for at in range(12, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        found = []
        for one, parts in disk.load():
            with pytest.raises(ParkRefused):
                found.append((one, list(parts)))
        assert not found
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert not list(disk.load())
        assert size < 12 or not path.exists()


def test_bytes_and_age_are_bounded(disk, tmp_path):
    small = ParkDisk(tmp_path / "small", F, 3000, most_age_s=100.0)
    for number in range(10):
        saved = put(small, bytes([number]) * 900, b"c", b"h%d" % number)
        os.utime(small.folder / saved.name, (time.time() - 50 + number,) * 2)
        assert small.stored_bytes() <= 3000
    assert [parts[0][:1] for _, parts in everything(small)] == [b"\x09", b"\x08"], "the latest first"
    with pytest.raises(ParkRefused):
        put(small, bytes(3000), b"c", b"h")
    os.utime(small.folder / saved.name, (time.time() - 200,) * 2)
    assert [parts[0][:1] for _, parts in everything(small)] == [b"\x08"]


def sparse(path, size_bytes, begins=b""):
    with open(path, "wb") as file:
        file.write(begins)
        file.truncate(size_bytes)


@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 1, 1 << 40])
def test_a_planted_file_with_holes_makes_no_other_one_go(disk, size_bytes):
    kept = [put(disk, b"p", b"c", b"h%d" % number) for number in range(3)]
    for name in ("a", "b"):  # newer than all others
        sparse(disk.folder / f"{name}.park", size_bytes)
    assert disk.stored_bytes() < 4096
    assert {saved for saved, _ in everything(disk)} == set(kept)
    put(disk, b"p", b"c", b"another")
    assert len(everything(disk)) == 4


def test_a_planted_conversation_larger_than_the_pool_keeps_no_other_one_out(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_limits, "PAGE_TOKENS", 16)
    path, folder = tmp_path / "park.sock", tmp_path / "park"
    prompt = [*ids(100), 1]
    with ParkServer(path, 1 << 20, segment_bytes=SEGMENT, disk=ParkDisk(folder, F, 1 << 30)):
        a = lane_on(path)
        turn(a, prompt, tenant=b"t")
        settle(a)
        wait_for(lambda: len(list(folder.glob("*.park"))) == 1)
        a.park.close()
    huge = Saved(b"t" * 16, 1, (Mark(9, b"c" * 16, 1),), ((b"d" * 16, 1 << 29), (b"e" * 16, 1), (b"f" * 16, 1)))
    head = ParkDisk(folder, F, 1 << 30)._head(huge)
    sparse(folder / huge.name, len(head) + (1 << 29) + 2, head)
    with ParkServer(path, 1 << 20, segment_bytes=SEGMENT, disk=ParkDisk(folder, F, 1 << 30)):
        b = lane_on(path)
        assert turn(b, [*prompt, 2], tenant=b"t") == 101
        b.park.close()


def test_a_write_that_fails_leaves_nothing(disk):
    def broken(part):
        if part == 1:
            raise OSError("full")
        return np.zeros(1, np.uint8)

    with pytest.raises(OSError, match="full"):
        disk.save(saved_of(b"\0", b"c", b"h"), broken)
    assert not list(disk.folder.iterdir())
    (disk.folder / "x.park.tmp").write_bytes(b"half")
    ParkDisk(disk.folder, F, 1 << 20)
    assert not list(disk.folder.iterdir())


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ParkRefused):
        ParkDisk(tmp_path / "open", F, 1 << 20)


def test_the_longer_form_of_a_conversation_is_known():
    short, long = saved_of(b"a", b"b", b"c", b"h"), saved_of(b"a", b"B", b"C", b"c", b"h", tokens=200)
    assert longer_form(short, long)
    assert not longer_form(long, short)
    assert not longer_form(short, saved_of(b"x", b"B", b"C", b"c", b"h", tokens=200))


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_conversations_survive_a_restart_of_the_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_limits, "PAGE_TOKENS", 16)
    path, folder = tmp_path / "park.sock", tmp_path / "park"
    first = [*ids(100), 1]
    with ParkServer(path, 1 << 20, segment_bytes=SEGMENT, disk=ParkDisk(folder, F, 1 << 20)):
        a = lane_on(path)
        turn(a, first, tenant=b"t", marks=[70])
        settle(a)
        wait_for(lambda: len(list(folder.glob("*.park"))) == 1)
        turn(a, [*first, 2, 3], tenant=b"t")
        turn(a, ids(80, seed=4), tenant=b"u")
        settle(a)
        wait_for(lambda: len(list(folder.glob("*.park"))) == 2 and not list(folder.glob("*.tmp")))
        a.park.close()
    with ParkServer(path, 1 << 20, segment_bytes=SEGMENT, disk=ParkDisk(folder, F, 1 << 20)):
        b = lane_on(path)
        assert turn(b, [*first, 2, 3, 4], tenant=b"t") == 103
        assert turn(b, [*ids(80, seed=4), 4], tenant=b"u") == 80
        assert b.counters.restores == 2
        b.park.close()
    with ParkServer(path, 1 << 20, segment_bytes=SEGMENT, disk=ParkDisk(folder, b"g" * 32, 1 << 20)):
        c = lane_on(path)
        assert turn(c, [*first, 2, 3, 4], tenant=b"t") == 0, "another pack's"
        c.park.close()
