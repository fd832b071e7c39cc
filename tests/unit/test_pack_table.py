"""The table that a model sees: rows as tensors, counters kept, a disk's error without its path."""

import os
import threading

import numpy as np
import pytest
import torch

from lanes.counters import Counters
from lanes.errors import TableReadFailed
from lanes.models.pack_table import PackTable
from shared_experts.manifest import NgramInfo
from shared_experts.ngram import NgramTable
from shared_experts.row_reader import RowReader

INFO = NgramInfo(1, 600, 64, "f32", 0, 256, 16, 4096, (3, 5), (0, 300), (300, 300))


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "secret-place"
    path.write_bytes(np.random.default_rng(0).random(38 * 1024, np.float32).tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    with RowReader(descriptor, INFO, path, cache_bytes=1 << 20) as reader:
        yield reader, NgramTable(descriptor, INFO, path), path
    os.close(descriptor)


def test_rows_and_constants(files):
    reader, truth, _ = files
    table = PackTable(reader, Counters())
    ids = torch.tensor([[1, 599], [300, 1], [0, 0]])
    assert torch.equal(table.rows(ids), torch.from_numpy(truth.rows(ids.flatten().numpy())).view(3, 128))
    assert table.rows(ids.t()).shape == (2, 192)
    assert (table.multipliers.tolist(), table.offsets.tolist(), table.sizes.tolist()) == ([3, 5], [0, 300], [300, 300])


def test_counters_follow_and_may_be_restarted(files):
    counters = Counters()
    table = PackTable(files[0], counters)
    table.rows(torch.tensor([[1, 2]]))
    assert (counters.ngram_rows, counters.ngram_cache_hits, counters.ngram_read_bytes) == (2, 0, 8192)
    counters.restart()
    table.rows(torch.tensor([[1, 17], [2, 2]]))
    assert (counters.ngram_rows, counters.ngram_cache_hits, counters.ngram_read_bytes) == (4, 3, 4096)
    assert counters.ngram_prefetch_hits == 0
    table.prefetch(torch.tensor([[40, 41]]))
    while files[0].counters().in_flight:
        os.sched_yield()
    table.forget()
    table.prefetch(torch.tensor([[64, 65]]))
    while files[0].counters().in_flight:
        os.sched_yield()
    table.rows(torch.tensor([[64, 65]]))
    assert counters.ngram_prefetch_hits == 2


def test_an_error_of_the_disk_has_no_path(files):
    reader, _, path = files
    os.truncate(path, 4096)
    table = PackTable(reader, Counters())
    table.prefetch(torch.tensor([[500]]))
    table.rows(torch.tensor([[3]]))
    with pytest.raises(TableReadFailed, match="n-gram table of layer 1 cannot be read") as caught:
        table.rows(torch.tensor([[3], [500]]))
    assert str(path) not in str(caught.value)
    assert (caught.value.code, caught.value.retryable) == ("table_read_failed", True)


def many(first):
    """Of more tokens than are read at once, 2 rows each."""
    return torch.arange(first, first + 200).view(100, 2)


def test_rows_of_many_tokens_are_gathered_ahead_and_equal(files):
    reader, truth, _ = files
    counters = Counters()
    table = PackTable(reader, counters)
    one, other, third = many(0), many(200), many(400)
    table.prefetch(one)
    table.prefetch(one)
    table.prefetch(other)
    for ids in (one, other, third, one):  # as hinted, as hinted, never hinted, hinted once and taken once
        assert torch.equal(table.rows(ids), torch.from_numpy(truth.rows(ids.flatten().numpy())).view(100, 128))
    assert counters.ngram_rows == 4 * 200
    for ids in (one, other, third):
        table.prefetch(ids)
    table.forget()
    assert torch.equal(table.rows(other), torch.from_numpy(truth.rows(other.flatten().numpy())).view(100, 128))


def test_what_could_not_be_gathered_is_told_where_it_is_asked_for(files):
    os.truncate(files[2], 4096)
    table = PackTable(files[0], Counters())
    table.prefetch(many(300))
    with pytest.raises(TableReadFailed, match="n-gram table of layer 1 cannot be read"):
        table.rows(many(300))


def test_a_reader_is_closed_behind_what_is_being_gathered(files, monkeypatch):
    reader, asked, may = files[0], threading.Event(), threading.Event()
    monkeypatch.setattr("lanes.models.pack_table.PIECE_ROWS", 50)
    table, rows = PackTable(reader, Counters()), type(reader).read

    def slow(self, ids, into):
        asked.set()
        assert may.wait(60)
        return rows(self, ids, into)

    monkeypatch.setattr(type(reader), "read", slow)
    table.prefetch(many(0))
    assert asked.wait(60)
    closing = threading.Thread(target=reader.close)
    closing.start()
    may.set()
    closing.join(60)
    with pytest.raises(ValueError, match="closed"):
        table.rows(many(300))
