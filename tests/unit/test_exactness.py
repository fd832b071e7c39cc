"""The exactness command: what it says of two sets of logits, on what it runs."""

import pytest
import torch

from bench import exactness
from bench.exactness_cases import BITS, FAILURES
from bench.exactness_margins import MARGINS, Apart, apart
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack

WANT = torch.tensor([[10.0, 0.0, 9.9, -20.0], [10.0, 5.0, 0.0, 1.0]])


def test_the_worst_row_counts_of_its_own_scale():
    got = WANT.clone()
    got[0, 1], got[1, 1] = 0.1, 5.3
    assert apart(got, WANT, 0.031).startswith(
        "median 5.0e-03, 99th 3.0e-02, most 3.0e-02 of scale (3e-02), 0 other ids"
    )
    with pytest.raises(Apart, match="most 3"):
        apart(got, WANT, 0.029)


def test_another_token_counts_only_where_the_best_leads():
    got = WANT.clone()
    got[0, 2] = 10.1  # a tie that went the other way
    assert "0 other ids of 1 sure ones in 2" in apart(got, WANT, 0.02)
    with pytest.raises(Apart, match="1 other ids of 1 sure ones"):
        apart(torch.stack((got[0], WANT[1].flip(0))), WANT, 0.24)


def test_what_is_not_finite_is_never_equal():
    got = WANT.clone()
    got[1, 3] = float("nan")
    with pytest.raises(Apart, match="most inf"):
        apart(got, WANT, 0.5)


def test_an_end_of_sequence_stands_among_what_windows_read(tmp_path):
    with Pack.open(tiny_pack(tmp_path, "q4g32")) as pack:
        ground, _ = exactness.ground(pack, "cpu", (20, 8, 32))
        assert (len(ground.ids), len(ground.rest)) == (28, 8)
        assert ground.rest[4] == pack.manifest.config["eos_token_id"]


def test_every_row_has_a_name_of_its_own():
    names = [*BITS, *MARGINS, *FAILURES]
    assert len(set(names)) == len(names)
    assert all(any(word in name for name in names) for word in exactness.INTERPRETED)
