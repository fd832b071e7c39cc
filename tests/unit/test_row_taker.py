"""Rows as fp32 where they are wanted, at once or waited for: what `rows` gives and counts, whoever else asks."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts.errors import NgramReadError
from shared_experts.manifest import NgramInfo
from shared_experts.ngram import NgramTable
from shared_experts.row_reader import RowReader
from tests.unit.test_row_reader import SHAPES, Pages, ids_of, wait_until_idle, write_table

MOST = 24


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def table(request, tmp_path_factory):
    columns, dtype, rows = request.param
    path = tmp_path_factory.mktemp("taker") / "t"
    with opened(path, columns, dtype, rows) as found:
        yield found


@contextmanager
def opened(path, *shape) -> Iterator[tuple]:
    info = write_table(path, *shape)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, info, path
    os.close(descriptor)


@pytest.fixture
def simple(tmp_path):
    with opened(tmp_path / "t", 160, "bf16", 1000) as found:
        yield found


class Taken:
    """A reader's taker and its arrays; what it did not write is nan."""

    def __init__(self, reader: RowReader, info: NgramInfo) -> None:
        self.ids, self.out = np.zeros(MOST, np.int64), np.empty((MOST, info.columns), np.float32)
        self._take = reader.taker(self.ids, self.out)

    def __call__(self, *ids: int) -> bool:
        self.ids[: len(ids)] = ids
        self.out.fill(np.nan)
        return self._take(len(ids))


def work(reader: RowReader) -> tuple[int, ...]:
    """What was counted, but for time."""
    counters = reader.counters()
    return counters.asked, counters.hits, counters.ahead, counters.prefetched, counters.reads, counters.cached_rows


@settings(max_examples=40)
@given(data=st.data())
def test_bits_and_counters_are_those_of_rows(table, data):
    descriptor, info, path = table
    truth, size = NgramTable(descriptor, info, path), data.draw(st.sampled_from([0, 20_000, 1 << 20]))
    some = st.lists(st.integers(0, min(40, info.rows - 1)), max_size=MOST)
    with (
        RowReader(descriptor, info, path, cache_bytes=size, depth=1) as reader,
        RowReader(descriptor, info, path, cache_bytes=size, depth=1) as twin,
    ):
        take = Taken(reader, info)
        for ahead, ids in data.draw(st.lists(st.tuples(st.booleans(), some), max_size=12)):
            if ahead:
                for each in (reader, twin):
                    each.prefetch(ids_of(*ids))
                    wait_until_idle(each)
                continue
            assert take(*ids)
            assert take.out[: len(ids)].tobytes() == truth.rows(ids_of(*ids)).tobytes()
            assert np.isnan(take.out[len(ids) :]).all()
            twin.rows(ids_of(*ids))
            assert work(reader) == work(twin)


def test_every_number_of_16_bits(tmp_path):
    numbers = np.arange(1 << 16, dtype="<u2")
    path = tmp_path / "t"
    path.write_bytes(numbers.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    for dtype in ("f16", "bf16"):
        info = NgramInfo(1, 32, 2048, dtype, 0, 4096, 1, 4096, (1,), (0,), (32,))
        with RowReader(descriptor, info, path) as reader:
            take, want = Taken(reader, info), NgramTable(descriptor, info, path)
            for row in range(32):
                assert take(row)
                wanted = want.rows(ids_of(row))[0]
                nan = np.isnan(wanted)  # of which there are many, and hardware makes another one of some
                assert (np.isnan(take.out[0]) == nan).all()
                assert take.out[0][~nan].tobytes() == wanted[~nan].tobytes()
    os.close(descriptor)


def test_what_is_not_there_is_waited_for_and_the_interpreter_is_free(simple):
    pages = Pages()
    pages.open.clear()
    with RowReader(*simple, source=pages) as reader:  # whose source needs the interpreter, as opening it does
        take = Taken(reader, simple[1])

        def open_once_asked() -> None:
            assert pages.begun.wait(20)
            pages.open.set()

        threading.Thread(target=open_once_asked).start()
        assert take(1, 500)
        assert take.out[:2].tobytes() == NgramTable(*simple).rows(ids_of(1, 500)).tobytes()


def test_while_somebody_else_waits_it_waits_too(simple):
    pages = Pages()
    with RowReader(*simple, source=pages) as reader:
        reader.rows(ids_of(7))
        pages.open.clear()
        pages.begun.clear()
        other = threading.Thread(target=reader.rows, args=(ids_of(900),))
        other.start()
        assert pages.begun.wait(20)
        threading.Timer(0.05, pages.open.set).start()
        assert Taken(reader, simple[1])(7)
        other.join()


def test_nothing_is_said_of_what_cannot_be_read(simple):
    pages = Pages()
    pages.fail[8192] = 0  # where the file's first page of rows is
    with RowReader(*simple, source=pages) as reader:
        take = Taken(reader, simple[1])
        assert not take(1, 500)
        with pytest.raises(NgramReadError, match="became shorter"):
            reader.rows(take.ids[:2])
        pages.fail.clear()
        assert take(1, 500)


@pytest.mark.parametrize("id", [-1, 1000, 1 << 62, -(1 << 63), (1 << 63) - 1])
def test_ids_outside_the_table_are_left_to_rows(simple, id):
    with RowReader(*simple) as reader:
        take, before = Taken(reader, simple[1]), work(reader)
        assert not take(1, id)
        assert work(reader) == before
        assert np.isnan(take.out).all()
        with pytest.raises(ValueError, match=r"must lie in 0\.\.999"):
            reader.rows(take.ids[:2])


def test_more_rows_than_there_is_room_for(simple):
    with RowReader(*simple) as reader:
        take = reader.taker(np.zeros(2, np.int64), np.zeros((2, 160), np.float32))
        with pytest.raises(AssertionError):
            take(3)


def test_arrays_of_another_shape_or_order_are_refused(simple):
    ids, out = np.zeros(2, np.int64), np.zeros((2, 160), np.float32)
    with RowReader(*simple) as reader:
        for bad in (
            (ids.astype(np.int32), out), (ids, out.astype(np.float64)), (ids, out[:1]), (ids, out[:, :5]),
            (np.zeros(4, np.int64)[::2], out), (ids, np.zeros((2, 320), np.float32)[:, ::2]),
        ):  # fmt: skip
            with pytest.raises(AssertionError):
                reader.taker(*bad)


def test_a_closed_reader_gives_nothing_whenever_it_is_closed(simple):
    for _ in range(20):
        reader = RowReader(*simple, depth=2)
        take, ready, ended = Taken(reader, simple[1]), threading.Event(), []

        def ask(take: Taken = take, ready: threading.Event = ready, ended: list = ended) -> None:
            ready.set()
            while take(1, 2, 3):
                pass
            ended.append(True)

        asker = threading.Thread(target=ask)
        asker.start()
        assert ready.wait(20)
        reader.close()
        asker.join(20)
        assert ended
        with pytest.raises(ValueError, match="closed"):
            reader.rows(ids_of(1))


def test_a_taker_outlives_its_reader(simple):
    reader = RowReader(*simple)
    take = Taken(reader, simple[1])
    assert take(1)
    reader.close()
    del reader
    assert not take(1)


def test_a_child_process_gets_nothing(simple):
    with RowReader(*simple, depth=2) as reader:
        take = Taken(reader, simple[1])
        assert take(1)
        child = os.fork()
        if child == 0:
            os._exit(int(take(1)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert take(1)
