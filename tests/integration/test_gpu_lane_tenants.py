"""What a GPU lane's windows and guesses leave in memory, and that another tenant's find none of it.

A captured graph keeps whatever was allocated while it was captured, out of reach of `erase`: so launches of windows and
guesses allocate nothing at all.
"""

import contextlib

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from bench.gpu_lane_rig import gpu_lane, small_pack
from lanes.models.qwen4_exp.gpu import activations

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("one_thread", "large_tiles"),
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    with small_pack(tmp_path_factory.mktemp("pack")) as pack:
        yield pack


class Allocations(TorchDispatchMode):
    """Operations whose results lie in memory that they were not given."""

    def __init__(self):
        super().__init__()
        self.found, self._looks = [], True

    @contextlib.contextmanager
    def elsewhere(self):
        """What a GPU has a function for that allocates nothing."""
        self._looks = False
        yield
        self._looks = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._looks:
            given, made = (
                {each.untyped_storage().data_ptr() for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)}
                for tree in ((args, kwargs), result)
            )
            if made - given - {0}:
                self.found.append(str(function))
        return result


@pytest.fixture
def allocations(monkeypatch):
    mode = Allocations()
    product = activations.product

    def without(*given):  # of a CPU's matrices; a GPU's products are written where they belong
        with mode.elsewhere():
            return product(*given)

    monkeypatch.setattr(activations, "product", without)
    return mode


def test_windows_allocate_nothing(pack, allocations):
    lane = gpu_lane(pack)
    lane.windows([5], lane.begin([7, 8, 9]), [1])
    window = lane.model._window
    with allocations:
        for rows in range(1, activations.MOST_ROWS + 1):
            window.run(rows)
        window.settle()
    assert allocations.found == []


def test_guesses_allocate_nothing(pack, allocations):
    lane = gpu_lane(pack, drafts=True)
    slot, asked = lane.begin([7, 8, 9]), lane.model._guessing._pass
    lane.model.guess(lane.states[slot], 5, 0)
    with allocations:
        for rows, number, named in ((1, 0, False), (activations.MOST_ROWS, 0, False), (1, 1, False), (1, 1, True)):
            asked.run(rows, number, named=named)
        asked.remember(2)
    assert allocations.found == []


def test_what_allocates_is_seen(allocations):
    with allocations:
        x = torch.zeros(3)
        x.add_(1)
        x.view(3, 1)
        x.exp()
    assert allocations.found == ["aten.zeros.default", "aten.exp.default"]
