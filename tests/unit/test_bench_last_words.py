"""A process that a bench asks says what became of it when the asking fails."""

import pytest

from bench.second_lane import running


def test_the_error_has_what_the_child_said_last():
    with pytest.raises(RuntimeError, match="asked") as caught, running("lanes"):
        raise RuntimeError("asked")
    (note,) = caught.value.__notes__
    assert "ended with 64; it said last:" in note
    assert "--owner" in note


def test_one_that_runs_is_called_that(monkeypatch):
    monkeypatch.setattr("bench.second_lane.ENDS_WITHIN_S", 0.0)
    with pytest.raises(RuntimeError) as caught, running("http.server", "--bind", "127.0.0.1", "0", "--directory"):
        raise RuntimeError
    assert " runs; it said last:" in caught.value.__notes__[0]
