"""Profiles of hot experts: written whole or not at all, merged, and refused where they are anything else."""

import os
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import limits
from lanes.counters import Counters
from lanes.experts import adaptive, profile
from lanes.experts.cache import ExpertCache
from lanes.experts.keeper import ProfileKeeper
from lanes.experts.policy import Budget, Touched
from lanes.experts.profile import MOST_USES, PackExperts
from tests.fakes.records import FakeRegion

OF = PackExperts(bytes(range(32)), 3, 8)
NAME = f"{OF.fingerprint.hex()[:16]}-lane-0.profile"


def values(seed=0):
    return np.random.default_rng(seed).uniform(0, 40, OF.keys).astype(np.float32)


def test_what_was_written_is_read(tmp_path):
    assert profile.read(tmp_path / "none", OF) is None
    profile.write(tmp_path / "new", "lane-0", OF, values())
    assert (profile.read(tmp_path / "new", OF) == values()).all()
    assert [file.name for file in (tmp_path / "new").iterdir()] == [NAME]
    assert (tmp_path / "new" / NAME).stat().st_mode & 0o777 == 0o600


def test_lanes_are_merged_and_other_packs_are_not(tmp_path):
    profile.write(tmp_path, "lane-0", OF, values(1))
    profile.write(tmp_path, "lane-1", OF, values(2))
    profile.write(tmp_path, "lane-2", PackExperts(bytes(32), 3, 8), values(3))
    profile.write(tmp_path, "lane-1", OF, values(4))  # again
    np.testing.assert_allclose(profile.read(tmp_path, OF), (values(1) + values(4)) / 2, rtol=1e-6)


def test_a_folder_that_cannot_be_written_fails_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    profile.write(tmp_path / "file", "lane-0", OF, values())
    assert profile.read(tmp_path / "file", OF) is None


@settings(max_examples=60)
@given(st.integers(0, 80 + 4 * 24 - 1), st.integers(1, 255))
def test_no_flipped_byte_is_believed(tmp_path_factory, at, by):
    folder = tmp_path_factory.mktemp("flips")
    profile.write(folder, "lane-0", OF, values())
    data = bytearray((folder / NAME).read_bytes())
    data[at] ^= by
    (folder / NAME).write_bytes(data)
    assert profile.read(folder, OF) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, MOST_USES * 2])
def test_values_out_of_range_are_refused_with_a_right_digest(tmp_path, bad):
    profile.write(tmp_path, "lane-0", OF, values())
    data = (tmp_path / NAME).read_bytes()
    body = data[80:-4] + struct.pack("<f", bad)
    import xxhash

    (tmp_path / NAME).write_bytes(data[:56] + xxhash.xxh3_128_digest(body) + data[72:80] + body)
    assert profile.read(tmp_path, OF) is None


def test_what_is_no_plain_file_of_the_right_size_is_refused(tmp_path):
    profile.write(tmp_path, "lane-1", OF, values())
    (tmp_path / NAME).symlink_to(tmp_path / NAME.replace("lane-0", "lane-1"))
    os.mkfifo(tmp_path / NAME.replace("lane-0", "lane-2"))
    (tmp_path / NAME.replace("lane-0", "lane-3")).mkdir()
    whole = (tmp_path / NAME.replace("lane-0", "lane-1")).read_bytes()
    (tmp_path / NAME.replace("lane-0", "lane-4")).write_bytes(whole + b"\0")
    (tmp_path / NAME.replace("lane-0", "lane-5")).write_bytes(whole[:-1])
    assert (profile.read(tmp_path, OF) == values()).all()  # that of lane-1 alone


def test_values_are_kept_in_range(tmp_path):
    profile.write(tmp_path, "lane-0", OF, np.full(OF.keys, 1e30))
    assert (profile.read(tmp_path, OF) == MOST_USES).all()


def test_so_many_files_are_read_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "MAX_PROFILES", 2)
    for lane in range(2):
        profile.write(tmp_path, f"lane-{lane}", OF, np.full(OF.keys, 4.0))
    profile.write(tmp_path, "lane-9", OF, np.full(OF.keys, 100.0))
    assert (profile.read(tmp_path, OF) == 4.0).all()
    assert limits.MAX_PROFILES > 2


def test_a_cache_begins_with_the_hottest():
    region = FakeRegion("f32", 8, 4, 3, 8)
    counters = Counters()
    cache = ExpertCache(region, region.info, 5 * region.info.record_bytes, adaptive.adaptive, counters)
    hot = np.zeros(24, np.float32)
    hot[[3, 9, 17]], hot[4] = (30, 20, 10), 1.0  # a half of the last is worth no slot
    cache.begin(adaptive.begun(hot, cache.room))
    assert cache.resident.reshape(-1).nonzero()[0].tolist() == [3, 9, 17]
    assert counters.cache_used_bytes == 3 * region.info.record_bytes
    cache.turn(Touched(np.array([3, 5]), np.array([1, 1]), 1))
    assert cache.resident.reshape(-1).nonzero()[0].tolist() == [3, 5, 9, 17]
    remembered = adaptive.remembered(cache.state)
    once = 1 + adaptive._LONG_SHARE  # one use, short and long
    assert remembered[3] == pytest.approx(15 + once, rel=0.02)
    assert remembered[5] == pytest.approx(once, rel=0.02)


def test_a_state_begun_from_what_it_remembers_goes_on_as_before():
    rng = np.random.default_rng(3)
    budget, state = Budget(6, 3), adaptive.State.empty(24)
    for _ in range(40):
        keys = np.sort(rng.choice(24, 5, replace=False))
        state, _ = adaptive.adaptive(state, Touched(keys, np.ones(5, np.int64), 1), budget)
    again = adaptive.begun(2 * adaptive.remembered(state), 6)
    np.testing.assert_allclose(adaptive.remembered(again), adaptive.remembered(state))
    assert again.resident.sum() == 6


def test_a_lane_writes_while_it_works_and_begins_where_it_ended(tmp_path):
    region = FakeRegion("f32", 8, 4, 3, 8)

    def lane(name, every_s):
        cache = ExpertCache(region, region.info, 5 * region.info.record_bytes, adaptive.adaptive, Counters())
        keeper = ProfileKeeper(tmp_path, name, OF, cache, every_s)
        keeper.start()
        return cache, keeper

    cache, keeper = lane("lane-0", 0.01)
    touched = Touched(np.array([1, 7]), np.array([1, 1]), 1)
    for _ in range(9):
        cache.turn(touched)
    until = time.monotonic() + 60
    while profile.read(tmp_path, OF) is None or profile.read(tmp_path, OF)[7] < 8:
        assert time.monotonic() < until
        time.sleep(0.01)
    cache.turn(touched)
    keeper.close()
    assert profile.read(tmp_path, OF)[7] == pytest.approx(10, rel=0.05)
    cache, keeper = lane("lane-1", 60)
    assert cache.resident.reshape(-1).nonzero()[0].tolist() == [1, 7]
    keeper.close()
    assert [file.name for file in tmp_path.iterdir()] == [NAME]  # it saw no window, so it has nothing to say
