"""Rows read ahead through a cache: the same bytes as the buffered truth, cached, missing or broken."""

import ctypes
import errno
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts.errors import NgramReadError
from shared_experts.manifest import NgramInfo, ngram_pages
from shared_experts.ngram import NgramTable
from shared_experts.row_reader import RowReader, cache_bytes
from tests.fakes.descriptors import held, threads

SHAPES = [
    (160, "bf16", 1000),
    (5, "f32", 2000),
    (7, "f16", 3000),
    (3000, "bf16", 70),
    (1025, "f32", 40),
    (2048, "f16", 90),
]
BEFORE = 8192  # bytes of the file before the table


def write_table(path: Path, columns: int, dtype: str, rows: int) -> NgramInfo:
    """A file of random bytes around a table; fp patterns that are NaN do not occur."""
    row_bytes, rows_per_page, page_bytes = ngram_pages(columns, dtype)
    size = BEFORE + -(-rows // rows_per_page) * page_bytes
    path.write_bytes(np.random.default_rng(rows).integers(0, 0x70, size, np.uint8).tobytes())
    return NgramInfo(1, rows, columns, dtype, BEFORE, row_bytes, rows_per_page, page_bytes, (1,), (0,), (rows,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def table(request, folder):
    columns, dtype, rows = request.param
    path = folder / f"{columns}{dtype}"
    info = write_table(path, columns, dtype, rows)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, info, path
    os.close(descriptor)


@pytest.fixture
def simple(tmp_path):
    path = tmp_path / "t"
    info = write_table(path, 160, "bf16", 1000)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, info, path
    os.close(descriptor)


class Pages:
    """A source that reads the true file, counts, and can be held, cut or broken."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.fail: dict[int, int] = {}  # offset -> what to return instead
        self.most = 1 << 30  # bytes of one read

    def __call__(self, fd: int, address: int, size: int, offset: int) -> int:
        self.begun.set()
        self.open.wait(20)
        self.offsets.append(offset)
        if offset in self.fail:
            return self.fail[offset]
        return min(self.most, os.preadv(fd, [(ctypes.c_char * size).from_address(address)], offset))


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@settings(max_examples=40)
@given(data=st.data())
def test_equal_to_the_truth_in_any_order_of_calls(table, data):
    descriptor, info, path = table
    truth = NgramTable(descriptor, info, path)
    some = st.lists(st.integers(0, info.rows - 1), max_size=60)
    with RowReader(descriptor, info, path, cache_bytes=data.draw(st.sampled_from([0, 1 << 20])), depth=3) as reader:
        for what, ids in data.draw(st.lists(st.tuples(st.sampled_from("prfr"), some), max_size=12)):
            if what == "p":
                reader.prefetch(ids_of(*ids))
            elif what == "f":
                reader.forget()
            else:
                np.testing.assert_array_equal(reader.rows(ids_of(*ids)), truth.rows(ids_of(*ids)))
        counters = reader.counters()
        assert counters.hits + counters.ahead <= counters.asked
        assert counters.cached_rows <= counters.capacity_rows


def test_the_whole_table_through_the_smallest_cache(table):
    descriptor, info, path = table
    truth = NgramTable(descriptor, info, path)
    ids = np.random.default_rng(0).integers(0, info.rows, 3000)
    with RowReader(descriptor, info, path, cache_bytes=0, depth=2) as reader:
        assert reader.counters().capacity_rows == 8
        reader.prefetch(ids)
        np.testing.assert_array_equal(reader.rows(ids), truth.rows(ids))
        everything = np.arange(info.rows)
        np.testing.assert_array_equal(reader.rows(everything), truth.rows(everything))


def test_what_is_there_is_not_read_again(simple):
    pages = Pages()
    with RowReader(*simple, source=pages) as reader:
        reader.rows(ids_of(1, 500, 1, 999, 1))
        assert sorted(pages.offsets) == [BEFORE + page * 4096 for page in (0, 500 // 12, 999 // 12)]
        reader.rows(ids_of(999, 1))
        counters = reader.counters()
        assert (len(pages.offsets), counters.reads, counters.read_bytes) == (3, 3, 3 * 4096)
        assert (counters.asked, counters.hits, counters.ahead, counters.prefetched) == (7, 2, 0, 0)


def test_prefetched_rows_are_there_when_asked_for(simple):
    pages = Pages()
    with RowReader(*simple, source=pages) as reader:
        reader.prefetch(ids_of(3, 300, 3))
        wait_until_idle(reader)
        reader.prefetch(ids_of(300))
        assert reader.counters().prefetched == 2
        reader.rows(ids_of(300, 3, 300))
        counters = reader.counters()
        assert (counters.asked, counters.ahead, counters.hits, counters.reads) == (3, 2, 1, 2)
        assert counters.wait_ns == 0


def test_prefetch_never_waits_and_what_is_asked_overtakes_it(simple):
    descriptor, info, path = simple
    pages = Pages()
    pages.open.clear()
    with RowReader(descriptor, info, path, depth=1, cache_bytes=1 << 20, source=pages) as reader:
        ahead = np.arange(0, 960, 12)  # one per page
        reader.prefetch(ahead)
        assert reader.counters().in_flight == len(ahead)
        assert pages.begun.wait(60)

        def open_once_asked() -> None:
            until = time.monotonic() + 60
            while reader.counters().in_flight < len(ahead) + 1 and time.monotonic() < until:
                time.sleep(0.001)
            pages.open.set()

        threading.Thread(target=open_once_asked).start()
        reader.rows(ids_of(996, 948))
        first = pages.offsets[:3]
        assert set(first[1:]) == {BEFORE + page * 4096 for page in (996 // 12, 948 // 12)}, (
            "behind the one that had begun"
        )
        np.testing.assert_array_equal(reader.rows(ahead), NgramTable(descriptor, info, path).rows(ahead))


def test_forget_empties_the_queue(simple):
    pages = Pages()
    pages.open.clear()
    with RowReader(*simple, depth=2, source=pages) as reader:
        reader.prefetch(np.arange(0, 960, 12))
        reader.forget()
        assert reader.counters().in_flight <= 2
        pages.open.set()
        wait_until_idle(reader)
        assert len(pages.offsets) <= 2
        reader.rows(np.arange(0, 960, 12))


def test_a_cache_for_so_many_rows_ahead_has_room_for_them_and_no_more(simple):
    pages = Pages()
    pages.open.clear()
    with RowReader(*simple, depth=1, cache_bytes=cache_bytes(simple[1], 40), source=pages) as reader:
        reader.prefetch(np.arange(40))
        assert reader.counters().dropped == 0
        reader.prefetch(np.arange(41))
        assert reader.counters().dropped == 1
        pages.open.set()


def test_prefetch_is_bounded_by_half_the_cache(simple):
    pages = Pages()
    pages.open.clear()
    with RowReader(*simple, depth=4, cache_bytes=0, source=pages) as reader:
        reader.prefetch(np.arange(8))
        assert reader.counters().dropped == 0
        reader.prefetch(np.arange(9))
        counters = reader.counters()
        assert (counters.capacity_rows, counters.prefetched, counters.dropped, counters.in_flight) == (16, 8, 1, 8)
        reader.forget()
        reader.prefetch(np.arange(100, 108))  # what was given up makes room
        pages.open.set()


def test_rows_asked_for_often_outlive_a_stream_of_others(simple):
    pages = Pages()
    with RowReader(*simple, depth=4, cache_bytes=0, source=pages) as reader:
        for start in range(8, 400, 4):
            reader.rows(ids_of(0, 1))
            reader.rows(np.arange(start, start + 4))
        assert pages.offsets.count(BEFORE) < 20  # the page of rows 0 to 11; 98 rounds


@pytest.mark.parametrize("most", [4096, 4095, 1000])
def test_reads_cut_short_go_on(folder, most):
    path = folder / f"cut{most}"
    info = write_table(path, 5000, "f32", 9)  # a row of five pages
    descriptor = os.open(path, os.O_RDONLY)
    pages = Pages()
    pages.most = most
    truth = NgramTable(descriptor, info, path)
    with RowReader(descriptor, info, path, source=pages) as reader:
        if most == 4096:
            np.testing.assert_array_equal(reader.rows(ids_of(8, 0)), truth.rows(ids_of(8, 0)))
        else:  # a read that gets no further than within a page is the end of the file
            with pytest.raises(NgramReadError, match=f"became shorter: {most} of 20480"):
                reader.rows(ids_of(8))
    os.close(descriptor)


@pytest.mark.parametrize(("answer", "text"), [
    (-errno.EIO, "Input/output error"), (0, "became shorter: 0 of 4096"), (5000, "Input/output error"),
    (-errno.EBADF, "Bad file descriptor"), (100, "became shorter: 100 of 4096"),
])  # fmt: skip
def test_a_failed_read_names_file_table_and_place(simple, answer, text):
    descriptor, info, path = simple
    pages = Pages()
    bad = BEFORE + 500 // 12 * 4096
    pages.fail[bad] = answer
    with RowReader(descriptor, info, path, source=pages) as reader:
        for _ in range(2):
            with pytest.raises(NgramReadError, match=rf"ngram\.1.*byte {bad}: .*{text}") as caught:
                reader.rows(ids_of(1, 500, 2, 500, 900))
            assert (caught.value.code, caught.value.retryable) == ("ngram_read", False)
            assert (caught.value.file, caught.value.layer, caught.value.offset) == (str(path), 1, bad)
        reader.rows(ids_of(1, 900))
        pages.fail.clear()
        np.testing.assert_array_equal(
            reader.rows(ids_of(1, 500)), NgramTable(descriptor, info, path).rows(ids_of(1, 500))
        )


def test_a_failed_prefetch_is_read_again_when_asked_for(simple):
    pages = Pages()
    pages.fail[BEFORE] = -errno.EIO
    with RowReader(*simple, source=pages) as reader:
        reader.prefetch(ids_of(5))
        wait_until_idle(reader)
        assert reader.counters().cached_rows == 0
        with pytest.raises(NgramReadError, match="Input/output"):
            reader.rows(ids_of(5))
        pages.fail.clear()
        reader.rows(ids_of(5))


def test_a_file_that_shrinks_after_it_was_opened(simple):
    descriptor, info, path = simple
    with RowReader(descriptor, info, path) as reader:
        kept = reader.rows(ids_of(0))
        os.truncate(path, BEFORE + 41 * 4096 + 100)
        with pytest.raises(NgramReadError, match="the file became shorter: 0 of 4096"):
            reader.rows(ids_of(0, 999))
        with pytest.raises(NgramReadError, match=r"the file became shorter: \d+ of 4096"):
            reader.rows(ids_of(500))  # its page ends before it
        np.testing.assert_array_equal(reader.rows(ids_of(0)), kept)


def test_direct_where_the_file_system_takes_it(simple):
    with RowReader(*simple) as reader:
        files = [fd for fd in os.listdir("/proc/self/fd") if link(fd) == str(simple[2])]
        assert (reader.mode == "direct") == any(flags(fd) & os.O_DIRECT for fd in files)


def test_buffered_where_it_is_refused_at_open(simple, refuse_direct):
    refuse_direct()
    check_buffered(*simple)


def test_buffered_where_it_is_refused_at_the_first_read(simple, monkeypatch):
    true_preadv, asked = os.preadv, []

    def refuse(*arguments):
        asked.append(arguments)
        if len(asked) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true_preadv(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        reader = RowReader(*simple)
    with reader:
        assert reader.mode == "buffered"
        np.testing.assert_array_equal(reader.rows(ids_of(7)), NgramTable(*simple).rows(ids_of(7)))


def check_buffered(descriptor, info, path):
    with RowReader(descriptor, info, path) as reader:
        assert reader.mode == "buffered"
        np.testing.assert_array_equal(reader.rows(ids_of(7)), NgramTable(descriptor, info, path).rows(ids_of(7)))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_another_error_at_the_start_is_no_fallback(simple, monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(NgramReadError, match=r"ngram\.1.*Input/output error"):
        RowReader(*simple)


def test_a_closed_descriptor_and_a_pipe_are_refused(simple):
    _, info, path = simple
    ends = os.pipe()
    try:
        with pytest.raises(NgramReadError):
            RowReader(ends[0], info, path)
    finally:
        for end in ends:
            os.close(end)
    with pytest.raises(NgramReadError, match="cannot be read"):
        RowReader(ends[0], info, path)


@pytest.mark.parametrize("bad", [-1, 1000, 1 << 62])
@pytest.mark.parametrize("call", ["rows", "prefetch"])
def test_ids_outside_are_refused(simple, bad, call):
    with RowReader(*simple) as reader, pytest.raises(ValueError, match=r"must lie in 0\.\.999"):
        getattr(reader, call)(ids_of(0, bad))


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int64), np.zeros(3, np.int32), np.zeros(3, np.float32)])
@pytest.mark.parametrize("call", ["rows", "prefetch"])
def test_other_arrays_are_refused(simple, ids, call):
    with RowReader(*simple) as reader, pytest.raises(ValueError, match="one-dimensional int64"):
        getattr(reader, call)(ids)


def test_no_ids(simple):
    with RowReader(*simple) as reader:
        reader.prefetch(ids_of())
        assert reader.rows(ids_of()).shape == (0, 160)


def test_strided_ids(simple):
    descriptor, info, path = simple
    ids = np.arange(1000)[::7]
    with RowReader(descriptor, info, path) as reader:
        reader.prefetch(ids)
        np.testing.assert_array_equal(reader.rows(ids), NgramTable(descriptor, info, path).rows(ids))


def test_no_thread_and_no_descriptor_is_left(simple):
    gc.collect()
    before = threads("table-rows"), held(simple[2])
    for _ in range(20):
        with RowReader(*simple, depth=8) as reader:
            reader.prefetch(np.arange(1000))
            assert threads("table-rows") == before[0] + 8
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.rows(ids_of(1))
    assert (threads("table-rows", before[0]), held(simple[2])) == before
    for depth in (0, 257):
        with pytest.raises(ValueError, match="depth"):
            RowReader(*simple, depth=depth)
    assert (threads("table-rows", before[0]), held(simple[2])) == before


def test_a_child_process_is_refused_and_harms_nothing(simple):
    descriptor, info, path = simple
    with RowReader(descriptor, info, path, depth=2) as reader:
        reader.prefetch(np.arange(1000))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                reader.rows(ids_of(1))
            except ValueError as error:
                code = 0 if "after a fork" in str(error) else 2
            reader.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ids = np.arange(1000)
        np.testing.assert_array_equal(reader.rows(ids), NgramTable(descriptor, info, path).rows(ids))


def test_several_threads_wait_for_each_other(simple):
    descriptor, info, path = simple
    truth = NgramTable(descriptor, info, path).rows(np.arange(1000))
    wrong = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            ids = rng.integers(0, 1000, 40)
            reader.prefetch(rng.integers(0, 1000, 8))
            if not np.array_equal(reader.rows(ids), truth[ids]):
                wrong.append(seed)
            reader.forget()

    with RowReader(descriptor, info, path, depth=3, cache_bytes=0) as reader:
        askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    assert wrong == []


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def flags(fd: str) -> int:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def wait_until_idle(reader: RowReader) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if reader.counters().in_flight == 0:
            return
        pause.wait(0.005)
    raise AssertionError("reads never ended")
