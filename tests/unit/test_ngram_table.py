"""Rows of n-gram tables: any ids in any order, at the edges of pages, refused outside."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts import ngram as ngram_module
from shared_experts.convert import convert
from shared_experts.errors import NgramReadError
from shared_experts.manifest import ngram_pages
from shared_experts.pack import Pack
from tests.fakes.checkpoints import SMALL, small_checkpoint


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ngram")
    small_checkpoint(folder / "c", replace(SMALL, ngram_vocab_size_base=500))
    convert(folder / "c", folder / "p", experts="f32", dense="f32")
    with Pack.open(folder / "p") as opened:
        yield opened


@pytest.fixture(scope="module")
def table(pack):
    """Every row, cut out of the file by the rule that the manifest states."""
    info = pack.ngram(1).info
    data = (pack.path / "ngram.bin").read_bytes()
    rows = [
        data[start : start + info.row_bytes]
        for r in range(info.rows)
        for start in [info.offset + r // info.rows_per_page * info.page_bytes + r % info.rows_per_page * info.row_bytes]
    ]
    return np.frombuffer(b"".join(rows), np.float32).reshape(info.rows, info.columns)


@settings(max_examples=50)
@given(data=st.data())
def test_any_ids_in_any_order(pack, table, data):
    ids = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=40))
    rows = pack.ngram(1).rows(np.array(ids, np.int64))
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, table[np.array(ids, np.int64)].reshape(len(ids), table.shape[1]))


def test_edges_of_pages_and_of_the_table(pack, table):
    per_page = pack.ngram(1).info.rows_per_page
    ids = np.array([0, per_page - 1, per_page, 2 * per_page - 1, len(table) - 1], np.int64)
    np.testing.assert_array_equal(pack.ngram(1).rows(ids), table[ids])


@pytest.mark.parametrize("bad", [-1, 1 << 40, -(1 << 62)])
def test_ids_outside_are_refused(pack, table, bad):
    with pytest.raises(ValueError, match=r"must lie in 0\.\."):
        pack.ngram(1).rows(np.array([0, bad], np.int64))


def test_the_first_id_past_the_end_is_refused(pack, table):
    with pytest.raises(ValueError, match=f"{len(table)}"):
        pack.ngram(1).rows(np.array([len(table)], np.int64))


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int64), np.zeros(3, np.int32), np.zeros(3, np.float32)])
def test_other_arrays_are_refused(pack, ids):
    with pytest.raises(ValueError, match="one-dimensional int64"):
        pack.ngram(1).rows(ids)


def test_a_layer_without_a_table(pack):
    with pytest.raises(KeyError):
        pack.ngram(0)


def test_repeated_ids_are_read_once(pack, monkeypatch):
    reads = []
    preadv = ngram_module.os.preadv
    monkeypatch.setattr(ngram_module.os, "preadv", lambda *a: reads.append(a[2]) or preadv(*a))
    pack.ngram(1).rows(np.array([7, 3, 7, 7, 3], np.int64))
    assert len(reads) == 2


def test_a_table_that_shrinks_is_noticed(tmp_path):
    small_checkpoint(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "p", experts="f32")
    with Pack.open(tmp_path / "p") as pack:
        (tmp_path / "p" / "ngram.bin").write_bytes(b"")
        with pytest.raises(NgramReadError, match=r"ngram\.1.*became shorter"):
            pack.ngram(1).rows(np.array([0], np.int64))


@pytest.mark.parametrize(
    ("columns", "dtype", "expected"),
    [
        (160, "bf16", (320, 12, 4096)),  # the released model
        (2048, "bf16", (4096, 1, 4096)),
        (2049, "bf16", (4098, 1, 8192)),
        (1024, "f32", (4096, 1, 4096)),
        (1025, "f32", (4100, 1, 8192)),
        (1, "f16", (2, 2048, 4096)),
    ],
)
def test_rows_never_cross_a_page(columns, dtype, expected):
    assert ngram_pages(columns, dtype) == expected
