"""Ids of a window that asks for the best, as an array: over where they lie now, whoever's tensor it is."""

import numpy as np
import torch

from lanes.runner import ModelRunner
from lanes.window import Window


class Model:
    """Answers with what lies in `found`."""

    def __init__(self) -> None:
        self.found = torch.zeros(1)

    def forward(self, window, states, meanwhile):
        return self.found


def ran(runner, rows, *, best=True):
    window = Window.of_sequence(list(range(rows)), 0, 7, logits="all", trial=True, best=best)
    return runner.forward(window, lambda: False)


class Nobody:
    """Experts that are not asked."""


def test_ids_are_those_that_lie_there_now():
    model, held = Model(), torch.arange(4)
    runner = ModelRunner(model, None, Nobody(), {})
    ones, twos = held[:1], held[:2]
    for first in (5, 9):
        held[0] = first
        model.found = ones
        assert ran(runner, 1).tolist() == [first]
        model.found = twos
        assert ran(runner, 2).tolist() == [first, 1]
    model.found = torch.tensor([3])  # another tensor of as many
    assert ran(runner, 1).tolist() == [3]
    model.found = ones
    assert ran(runner, 1).tolist() == [9]


def test_logits_are_never_kept():
    model = Model()
    runner = ModelRunner(model, None, Nobody(), {})
    for best in (False, True):
        model.found = torch.tensor([[0.0, 2.0, 1.0]])
        found = ran(runner, 1, best=best)
        assert np.array_equal(found, [1] if best else [[0.0, 2.0, 1.0]])
    assert runner._ids == {}
