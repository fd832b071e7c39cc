"""The grouped expert kernel in Triton's interpreter: bit-equal to the reference, however rows and experts are cut."""

import numpy as np
import pytest
import torch
import triton

from lanes.kernels import grouped, places
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from tests.fakes import kernel_grouped as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_ROWS", 16)
    monkeypatch.setattr(grouped, "ADD_COLUMNS", 128)


@pytest.mark.parametrize(
    ("format", "hidden", "inner", "rows", "chosen", "count", "cuts"),
    [
        ("q4g64", 128, 64, 5, 2, 4, ()),
        ("q4g64", 1152, 64, 2, 1, 2, ()),  # 18 groups: chains of three and of two
        ("q4g64", 64, 576, 2, 2, 3, (1, 2)),  # 9 groups of the intermediate
        ("q4g32", 32, 544, 2, 1, 2, ()),  # 17, more than stay in shared memory
        ("q4g32", 96, 32, 20, 2, 3, (2,)),  # an expert in two tiles, tiles wider than the matrix
        ("q8", 128, 64, 5, 3, 5, (0, 3, 3)),  # batches without experts
        ("q8", 64, 128, 2, 1, 3, ()),
    ],
)
def test_every_bit(format, hidden, inner, rows, chosen, count, cuts):
    cases.check_grouped("cpu", format, hidden, inner, rows, chosen, count, cuts=cuts)


@pytest.mark.parametrize("format", ["q4g64", "q8"])
def test_hostile_records_and_activations(format):
    cases.check_grouped("cpu", format, 128, 64, 4, 2, 3, cuts=(1,), hostile=True, seed=3)


def test_where_chunks_and_batches_end_changes_no_bit():
    cases.check_chunks("cpu", RecordLayout.of(EXPERT_FORMATS["q4g32"], 32, 32), 5, 1, 2)


def test_groups_and_tiles():
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(np.stack([np.sort(rng.permutation(9)[:3]) for _ in range(50)]))
    groups = grouped.ask(ids, 9).groups()
    flat = ids.reshape(-1)
    assert torch.equal(flat[groups.pair.long()], flat.sort().values)
    assert torch.equal(groups.pair[groups.place.long()], torch.arange(150, dtype=torch.int32))
    rows = groups.pair.long() // 3
    for e in range(9):
        mine = rows[groups.offsets[e] : groups.offsets[e + 1]]
        assert torch.equal(mine, mine.sort().values)
    covered = []
    for first, end in [(0, 4), (4, 4), (4, 9)]:
        work = places.batch(groups, first, end)
        assert work.places == groups.offsets[end] - groups.offsets[first]
        for expert, place, count in groups.tiles[work.first_tile : work.end_tile].tolist():
            assert first <= expert < end
            assert 1 <= count <= grouped.BLOCK_ROWS
            assert (flat[groups.pair[place : place + count].long()] == expert).all()
            covered += range(place, place + count)
    assert covered == list(range(150))


@pytest.mark.parametrize("most", [1, 20, 1000])
def test_batches_cover_every_place_once_within_their_bound(most):
    ids = torch.from_numpy(np.sort(np.random.default_rng(2).permuted(np.tile(np.arange(7), (30, 1)), axis=1)[:, :3]))
    groups = grouped.ask(ids + (ids > 3), 8).groups()  # nobody chooses 4
    covered, at = [], 0
    for work in places.batches(groups, 0, 8, most):
        assert work.first_place == at
        at = work.end_place
        experts = set(groups.tiles[work.first_tile : work.end_tile, 0].tolist())
        assert 4 not in experts
        assert work.places <= most or len(experts) == 1
        covered += sorted(experts)
    assert at == 90
    assert covered == [0, 1, 2, 3, 5, 6, 7]
