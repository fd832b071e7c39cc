"""What is gathered beside the engine: as much as is held, once each, errors where they are asked for."""

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from lanes.models.ahead import HELD, Ahead


class Gathering:
    """Rows that are twice their ids; counts what was begun, and may be held up."""

    def __init__(self):
        self.begun, self.given_up, self.may = [], [], threading.Event()
        self.may.set()

    def __call__(self, ids, given_up):
        self.begun.append(ids.tolist())
        assert self.may.wait(60)
        if given_up():
            self.given_up.append(ids.tolist())
            raise CancelledError
        if ids[0] < 0:
            raise ValueError("no such row")
        return torch.from_numpy(ids * 2)


def ids(*values):
    return np.array(values, np.int64)


def test_each_is_gathered_once_and_given_once():
    gathering = Gathering()
    ahead = Ahead(gathering, "test-ahead")
    for _ in range(3):
        ahead.ahead(ids(1, 2))
    assert ahead.take(ids(1, 2, 3)) is None
    assert ahead.take(ids(1, 2)).tolist() == [2, 4]
    assert ahead.take(ids(1, 2)) is None
    assert gathering.begun == [[1, 2]]
    ahead.ahead(ids(1, 2))
    assert ahead.take(ids(1, 2)).tolist() == [2, 4], "again, where it is asked for again"


@pytest.mark.parametrize("more", [0, 1])
def test_at_what_is_held_and_past_it(more):
    gathering = Gathering()
    ahead = Ahead(gathering, "test-ahead")
    for number in range(HELD + more):
        ahead.ahead(ids(number))
    found = [ahead.take(ids(number)) for number in range(HELD + more)]
    assert [each is None for each in found] == [True] * more + [False] * HELD, "the oldest go"


def test_what_is_forgotten_stops_and_what_waited_never_begins():
    gathering = Gathering()
    gathering.may.clear()
    ahead = Ahead(gathering, "test-ahead")
    ahead.ahead(ids(1))
    while not gathering.begun:
        threading.Event().wait(0.01)
    ahead.ahead(ids(2))
    ahead.forget()
    gathering.may.set()
    assert ahead.take(ids(1)) is None
    ahead.ahead(ids(3))
    assert ahead.take(ids(3)).tolist() == [6]
    assert gathering.given_up == [[1]]
    assert gathering.begun == [[1], [3]]


def test_an_error_is_told_to_whoever_asks():
    ahead = Ahead(Gathering(), "test-ahead")
    ahead.ahead(ids(-1))
    with pytest.raises(ValueError, match="no such row"):
        ahead.take(ids(-1))
    assert ahead.take(ids(-1)) is None
