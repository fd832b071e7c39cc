"""Where two answers part, and whether the model hardly chose there."""

import pytest
import torch

from bench.near_tie import choice, parting
from bench.quality import FileRecords, logits
from lanes.experts.naive import NaiveExperts
from lanes.tolerance import FP32
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack


@pytest.mark.parametrize(
    ("said", "place"), [((1, 2, 3), None), ((1, 9, 9), 1), ((1, 2, 9), 2), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_the_first_place_where_answers_differ(said, place):
    assert parting((1, 2, 3), said) == place


def test_a_choice_is_measured_on_the_row_after_the_ids(tmp_path, one_thread):
    path, ids = tiny_pack(tmp_path, "f32"), [5, 6, 7, 8, 9]
    with Pack.open(path) as pack:
        naive = NaiveExperts(pack.manifest.experts.layout, FileRecords(pack).record)
        row = logits(pack, naive, ids)[-1].double()
    best, second, *_, last = row.argsort(descending=True).tolist()
    scale = float(row.abs().max())
    for one, other in ((best, second), (second, best), (best, last), (second, last)):
        found = choice(path, ids, one, other)
        behind = float(row[best] - min(row[one], row[other]))
        assert found.apart == pytest.approx(behind / scale, abs=1e-5)
        assert found.allowed == 2 * FP32
        assert found.near == (found.apart <= found.allowed)
    assert not choice(path, ids, best, last).near
    assert choice(path, ids, best, best).near
    assert torch.isfinite(row).all()
