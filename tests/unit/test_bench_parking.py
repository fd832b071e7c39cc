"""The parking bench goes its whole way and compares what comes back."""

import json

import pytest
import torch

from bench import parking
from bench.parking import equal
from tests.fakes.states import fresh


def test_a_conversation_goes_its_whole_way(tmp_path, capsys):
    out = tmp_path / "parking.json"
    options = ["--device", "cpu", "--scale", "small", "--tokens", "300", "--repeats", "1", "--out", str(out)]
    assert parking.main(options) == 0
    result = json.loads(out.read_text())
    assert set(result["milliseconds"]) == {
        "park",
        "park_first",
        "park_marked",
        "again",
        "restore_and_take",
        "restore",
        "leave",
        "take",
        "next",
        "next_said",
        "branch",
        "checkpoint",
        "checkpoint_said",
    }
    assert min(result["milliseconds"].values()) > 0
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize("token", [0, 4])
def test_one_bit_is_seen(token):
    a, b = fresh([3, 1, 4, 1, 5]), fresh([3, 1, 4, 1, 5])
    assert equal(a, b, 5)
    rows = next(rows for rows in b.rows(token, token + 1) if rows.numel())
    bits = rows.view(torch.int16 if rows.dtype == torch.bfloat16 else torch.int32)
    bits[(0,) * bits.dim()] ^= 1
    assert not equal(a, b, 5)
