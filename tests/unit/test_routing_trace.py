import os
import resource
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import limits
from lanes.errors import TraceRefused
from lanes.experts.policy import Touched
from lanes.experts.trace import TraceHeader, TraceWriter, read_trace, trace_path

LAYERS, EXPERTS = 3, 8
HEADER = TraceHeader(LAYERS, EXPERTS, bytes(range(32)))


def touched(rows, window_rows):
    keys = np.array(sorted(rows), np.int64)
    return Touched(keys, np.array([rows[key] for key in sorted(rows)], np.int64), window_rows)


SOME = [touched({0: 1, 7: 1, 8: 1, 23: 1}, 1), touched({}, 2), touched({5: 65535, 16: 2}, 65535), touched({11: 4}, 4)]


def write(path, windows, **options):
    writer = TraceWriter(path, HEADER, **options)
    for window in windows:
        writer.record(window)
    writer.close()
    return path


def read(path):
    with read_trace(path) as (header, windows):
        return header, [(w.window_rows, w.keys.tolist(), w.rows.tolist()) for w in windows]


def plain(windows):
    return [(w.window_rows, w.keys.tolist(), w.rows.tolist()) for w in windows]


def test_what_was_written_is_read(tmp_path):
    path = write(tmp_path / "t", SOME)
    assert read(path) == (HEADER, plain(SOME))
    assert path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=50)
@given(
    st.lists(
        st.integers(1, 300).flatmap(
            lambda rows: st.dictionaries(st.integers(0, LAYERS * EXPERTS - 1), st.integers(1, rows)).map(
                lambda counts: touched(counts, rows)
            )
        ),
        max_size=6,
    )
)
def test_any_windows_come_back(tmp_path_factory, windows):
    assert read(write(tmp_path_factory.mktemp("t") / "t", windows))[1] == plain(windows)


def test_an_old_file_is_never_overwritten(tmp_path):
    (tmp_path / "t").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "t", HEADER)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "link", HEADER)
    assert (tmp_path / "t").read_bytes() == b"mine"


def test_the_limit_ends_the_trace_with_whole_windows(tmp_path):
    whole = write(tmp_path / "whole", SOME).stat().st_size
    assert len(read(write(tmp_path / "at", SOME, limit_bytes=whole))[1]) == len(SOME)
    below = write(tmp_path / "below", SOME, limit_bytes=whole - 1)
    assert read(below) == (HEADER, plain(SOME[:-1]))


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path):
    """A file size limit makes the same short write that a full disk makes."""
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.record(SOME[0])
    end = (tmp_path / "t").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (end + 5, hard))
    try:
        writer.record(SOME[0])
        writer.record(SOME[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.record(SOME[3])
    writer.close()
    assert read(tmp_path / "t") == (HEADER, plain(SOME[:1]))


def test_every_cut_is_whole_windows_or_refused(tmp_path):
    """A killed lane leaves a file cut anywhere."""
    data = write(tmp_path / "t", SOME).read_bytes()
    ends = [64]
    for window in SOME:
        ends.append(ends[-1] + 8 + 2 * LAYERS + 4 * len(window.keys))
    assert ends[-1] == len(data)
    for size in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:size])
        if size < 64:
            with pytest.raises(TraceRefused):
                read(tmp_path / "cut")
        else:
            assert read(tmp_path / "cut")[1] == plain(SOME[: sum(end <= size for end in ends[1:])])


def header(magic=b"EXPROUTE", version=1, layers=LAYERS, experts=EXPERTS, zero=0, last=0):
    return struct.pack("<8sIIII32sQ", magic, version, layers, experts, zero, bytes(32), last)


def window(rows=1, distinct=2, layers=(1, 0, 1), ids=(3, 4), counts=(1, 1)):
    return struct.pack("<II", rows, distinct) + np.array([*layers, *ids, *counts], "<u2").tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"EXPROUTE",
        header(magic=b"EXPROUTX"),
        header(version=0),
        header(version=2),
        header(zero=1),
        header(last=1),
        header(layers=0),
        header(experts=0),
        header(layers=limits.MAX_TRACE_LAYERS + 1),
        header(experts=limits.MAX_TRACE_EXPERTS + 1),
        header() + window(rows=0),
        header() + window(rows=limits.MAX_TRACE_ROWS + 1),
        header() + window(distinct=LAYERS * EXPERTS + 1),
        header() + window(distinct=2**32 - 1),
        header() + window(layers=(1, 0, 0)),
        header() + window(layers=(2, 0, 1)),
        header() + window(layers=(65535, 65535, 65535)),
        header() + window(layers=(2, 0, 0), ids=(4, 3)),
        header() + window(layers=(2, 0, 0), ids=(4, 4)),
        header() + window(ids=(3, EXPERTS)),
        header() + window(ids=(EXPERTS, 0), layers=(1, 1, 0)),
        header() + window(counts=(0, 1)),
        header() + window(counts=(1, 2)),
        header() + window() + window(counts=(1, 2)),
    ],
)
def test_hostile_files_are_refused(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceRefused):
        read(tmp_path / "t")


def test_the_hand_made_window_is_fine_as_it_is(tmp_path):
    (tmp_path / "t").write_bytes(header() + window())
    assert read(tmp_path / "t")[1] == [(1, [3, 20], [1, 1])]


def test_limits_themselves_are_read(tmp_path):
    at = header(layers=limits.MAX_TRACE_LAYERS, experts=limits.MAX_TRACE_EXPERTS)
    (tmp_path / "t").write_bytes(at)
    assert read(tmp_path / "t")[1] == []


def test_a_file_over_the_limit_is_refused(tmp_path):
    path = write(tmp_path / "t", SOME)
    os.truncate(path, limits.TRACE_BYTES + 1)  # sparse
    with pytest.raises(TraceRefused, match="at most"):
        read(path)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_windows_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_bytes(header() + data)
    try:
        _, windows = read(path)
    except TraceRefused:
        return
    for rows, keys, counts in windows:
        assert keys == sorted(set(keys))
        assert all(0 <= key < LAYERS * EXPERTS for key in keys)
        assert all(1 <= count <= rows for count in counts)


def test_a_size_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(TraceRefused):
        TraceWriter(tmp_path / "t", TraceHeader(1, limits.MAX_TRACE_EXPERTS + 1, bytes(32)))
    assert not (tmp_path / "t").exists()


def test_a_folder_takes_a_file_of_every_lane_that_starts(tmp_path):
    paths = [trace_path(tmp_path, "lane-0") for _ in range(2)]
    assert {path.parent for path in paths} == {tmp_path}
    assert len({*paths}) == 2
    assert trace_path(tmp_path / "new.trace", "lane-0") == tmp_path / "new.trace"
