"""Traces of requests: what a line says and never says, files and their bounds; bench reads what was written."""

import errno
import json
import os
import stat
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.aligned import Rules, Stamp, Stream
from bench.request_trace import BadTrace, lanes_of, parse, read_traces, summary
from coordinator import limits
from coordinator.errors import BadOption
from coordinator.telemetry import trace_writer
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.request_record import RequestRecord
from coordinator.telemetry.stats import Silent, Timeline
from coordinator.telemetry.trace import line
from coordinator.telemetry.trace_writer import TraceWriter
from laneproto.v1 import lane_pb2
from tests.unit.test_journal import Clock, asked


def ended(number=0, lane="lane-0", begin_s=10.0, count=3, step_s=0.5, **fields):
    stamps = [round((begin_s + 1 + k * step_s) * 1e9) for k in range(count)]
    given_fields = {
        "begun_s": begin_s, "first_token_s": begin_s + 1, "ended_s": begin_s + 1 + count * step_s, "tokens": count,
        "outcome": "length", "lanes": [(lane, 0)], "stamps_ns": array("Q", stamps),
    }  # fmt: skip
    return RequestRecord(f"r{number}", "http", "anyone", "who", 7, 50, begin_s - 1, **{**given_fields, **fields})


def test_a_line_says_times_and_counts_and_no_name_of_a_client():
    said = json.loads(line(ended()))
    assert said == {
        "v": 1, "id": "r0", "door": "http", "tenant": "anyone", "session": said["session"], "prompt_tokens": 7,
        "replaced_choices": None,
        "cached_tokens": 0, "max_tokens": 50, "tokens": 3, "queued_s": 9.0, "begun_s": 10.0, "first_token_s": 11.0,
        "ended_s": 12.5, "outcome": "length", "lanes": [["lane-0", 0]], "stamps_s": [11.0, 11.5, 12.0],
    }  # fmt: skip
    assert len(said["session"]) == 16
    assert "who" not in line(ended())
    assert json.loads(line(RequestRecord("r", "http", "t", "", 1, 1, 0.0)))["session"] is None


def write(folder, *records):
    writer = TraceWriter.open(folder)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


def test_bench_reads_what_was_written(tmp_path):
    moved = ended(1, lanes=[("lane-0", 0), ("lane-1", 2)])
    never = RequestRecord("r2", "grpc", "t", "", 4, 9, 5.0, ended_s=6.0, outcome="cancelled", stamps_ns=array("Q"))
    assert write(tmp_path, ended(), moved, never).written == 3
    first, second, third = read_traces([tmp_path])
    assert (first.id, first.outcome, first.tokens, first.first_token_s) == ("r0", "length", 3, 11.0)
    assert (third.lanes, third.stamps_s, third.begun_s) == ((), (), None)
    assert first.session == second.session != third.session
    lanes = lanes_of([first, second, third])
    stamps = tuple(Stamp(each) for each in (11.0, 11.5, 12.0))
    assert lanes == {
        "lane-0": [Stream(10.0, 12.5, stamps), Stream(10.0, 11.5, stamps[:2])],
        "lane-1": [Stream(12.0, 12.5, stamps[2:])],
    }


def test_the_aggregate_of_traces_is_that_of_their_streams(tmp_path):
    rules = Rules(min_window_s=1.0, max_gap_s=1.0)
    write(tmp_path, ended(0, "lane-0", 10.0, 30, 0.1), ended(1, "lane-1", 10.2, 30, 0.1))
    found = summary([tmp_path], rules)
    assert found["valid"], found["reasons"]
    assert found["lanes"] == {"lane-0": pytest.approx(10, rel=0.05), "lane-1": pytest.approx(10, rel=0.05)}
    assert (found["requests"], found["outcomes"], found["tokens"]) == (2, {"length": 2}, 60)


def test_files_are_ours_alone_and_a_new_server_begins_a_new_one(tmp_path):
    (tmp_path / "requests-000007.jsonl").write_text("old\n")
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, ended())
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["notes.txt", "requests-000007.jsonl", "requests-000008.jsonl"]
    assert stat.S_IMODE((tmp_path / "requests-000008.jsonl").stat().st_mode) == 0o600
    assert (tmp_path / "requests-000007.jsonl").read_text() == "old\n"


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("")
    (tmp_path / "requests-1.jsonl").symlink_to("victim")  # no name of ours
    (tmp_path / "requests-000001.jsonl").symlink_to("victim")
    write(tmp_path, ended())
    assert (tmp_path / "victim").read_text() == ""
    assert (tmp_path / "requests-000002.jsonl").read_text()


def test_a_full_file_is_followed_by_another(tmp_path, monkeypatch):
    size = len(line(ended())) + 1
    monkeypatch.setattr(limits, "TRACE_FILE_BYTES", 2 * size)  # at the limit: two fit
    monkeypatch.setattr(limits, "TRACE_FILES", 3)
    write(tmp_path, *[ended()] * 6)
    assert [each.stat().st_size for each in sorted(tmp_path.iterdir())] == [2 * size] * 3
    monkeypatch.setattr(limits, "TRACE_FILE_BYTES", 2 * size - 1)  # one byte less: one fits
    write(tmp_path, ended(), ended())
    sizes = [each.stat().st_size for each in sorted(tmp_path.iterdir())]
    assert sizes == [2 * size, size, size]  # and the oldest are gone
    assert sorted(each.name for each in tmp_path.iterdir())[-1] == "requests-000005.jsonl"


def test_stamps_at_the_limit_and_one_past_it(monkeypatch):
    monkeypatch.setattr(limits, "TRACE_STAMPS", 5)
    for count in (5, 6):
        clock, kept = Clock(), []
        journal = Journal(kept.append)
        record = journal.record(asked(), "http", clock())
        timeline = Timeline(Silent(), "http", clock, record, journal.ended)
        timeline.accepted(3, "lane-0")
        for k in range(0, count, 2):
            timeline.tokens([lane_pb2.Token(stamp_ns=100 + j) for j in range(k, min(k + 2, count))])
        timeline.ended("length")
        traced = parse(json.loads(line(kept[0])))
        assert (traced.tokens, len(traced.stamps_s), traced.whole) == (count, 5, count == 5)
    with pytest.raises(BadTrace, match="6 tokens and 5 stamps"):
        lanes_of([traced])


def test_a_disk_that_does_not_keep_up_loses_lines_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "TRACE_WAITING", 4)
    writer = TraceWriter.open(tmp_path)
    slow, real = threading.Event(), trace_writer.line

    def line_when_it_may(record):
        assert slow.wait(60)
        return real(record)

    monkeypatch.setattr(trace_writer, "line", line_when_it_may)
    for number in range(4):
        writer.write(ended(number))
    assert writer.lost == 0
    writer.write(ended(4))
    assert writer.lost == 1
    slow.set()
    writer.close()
    assert [each.id for each in read_traces([tmp_path])] == ["r0", "r1", "r2", "r3"]


def test_a_full_disk_loses_lines_and_a_cut_one_is_taken_back(tmp_path, monkeypatch):
    writer = TraceWriter.open(tmp_path)
    writer.write(ended(0))
    real, left = os.write, [40]

    def short(fd, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    writer._pool.submit(monkeypatch.setattr, os, "write", short).result(60)
    writer.write(ended(1))
    writer._pool.submit(monkeypatch.undo).result(60)
    writer.write(ended(2))
    writer.close()
    assert (writer.written, writer.lost) == (2, 1)
    assert [each.id for each in read_traces([tmp_path])] == ["r0", "r2"]


@pytest.mark.parametrize("cannot_cut", [False, True])
def test_a_disk_that_stays_full_pushes_out_no_file(tmp_path, monkeypatch, cannot_cut):
    monkeypatch.setattr(limits, "TRACE_FILES", 3)
    writer = TraceWriter.open(tmp_path)
    writer.write(ended())
    real, parts = os.write, iter([5, *[0] * 50])

    def full(fd, data):
        if part := next(parts):
            return real(fd, bytes(data)[:part])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(fd, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def disk_is_full():
        monkeypatch.setattr(os, "write", full)
        if cannot_cut:
            monkeypatch.setattr(os, "ftruncate", fails)

    writer._pool.submit(disk_is_full).result(60)
    for number in range(1, 2 if cannot_cut else 20):
        writer.write(ended(number))
    writer._pool.submit(monkeypatch.undo).result(60)
    writer.write(ended(20))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1 + cannot_cut
    said = [json.loads(each)["id"] for path in sorted(tmp_path.iterdir()) for each in path.read_text().splitlines()
            if each.endswith("}")]  # fmt: skip
    assert said == ["r0", "r20"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(BadOption, match="No such file"):
        TraceWriter.open(tmp_path / "missing")


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2}, {"lanes": 3}, {"lanes": [["lane-0", 1]]}, {"lanes": [["a", 0], ["b", 4]]}, {"lanes": []},
        {"lanes": [["a", 0], ["b", 2], ["c", 1]]}, {"tokens": -1}, {"tokens": True}, {"tokens": 2}, {"ended_s": None},
        {"ended_s": "1"}, {"queued_s": 99.0}, {"stamps_s": [float("inf")]}, {"stamps_s": [1, 2, 3, 4]},
        {"session": ...},
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_its_place(tmp_path, change):
    raw = {**json.loads(line(ended())), **change}
    raw = {key: value for key, value in raw.items() if value is not ...}
    file = tmp_path / "requests-000001.jsonl"
    file.write_text(f"{line(ended())}\n{json.dumps(raw)}\n")
    with pytest.raises(BadTrace, match=r"requests-000001\.jsonl:2: "):
        list(read_traces([tmp_path]))


KEYS = st.sampled_from(("v", "id", "lanes", "tokens", "stamps_s"))
LEAVES = st.none() | st.booleans() | st.floats() | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=8))
def test_any_json_but_a_trace_is_refused(raw):
    with pytest.raises(BadTrace):
        parse(raw)


def test_lines_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.request_trace.LINE_BYTES", 1000)
    (tmp_path / "a").write_bytes(b" " * 1001 + b"\n")
    with pytest.raises(BadTrace, match="longer than 1000"):
        list(read_traces([tmp_path / "a"]))
    (tmp_path / "a").write_bytes(b" " * 999)  # cut off, as a last line may be
    assert list(read_traces([tmp_path / "a"])) == []
