"""Taking over the first rows of a trial: bit-equal to running them alone, one at a time, from the same inputs."""

import copy

import pytest
import torch
import torch.nn.functional as F

from lanes.models.delta_rule import recurrent
from lanes.state.commit import commit
from lanes.state.errors import NoTrial
from lanes.state.sequence import SequenceState
from lanes.state.shape import NgramShape, RecurrentShape, StateShape
from lanes.state.trial import RecurrentInputs, Trial

HEADS, KEY, VALUE, CHANNELS, TAIL = 3, 8, 5, 14, 3
SHAPE = StateShape(
    attention={},
    recurrent={0: RecurrentShape(HEADS, KEY, VALUE, CHANNELS, TAIL), 2: RecurrentShape(HEADS, KEY, VALUE, CHANNELS, 1)},
    ngram={0: NgramShape(16, 9), 1: NgramShape(4, 2)},
    context_ids=2,
    context_fill=11,
    max_tokens=1000,
)


def lived_in(seed: int) -> SequenceState:
    state, random = SequenceState(SHAPE, 100), torch.Generator().manual_seed(seed)
    for each in (*state.recurrent.values(), *state.ngram.values()):
        each.conv.copy_(torch.randn(each.conv.shape, generator=random))
    for each in state.recurrent.values():
        each.matrix.copy_(torch.randn(each.matrix.shape, generator=random))
    state.context_ids.copy_(torch.tensor([5, 6]))
    state.length = 50
    return state


def a_trial(rows: int, seed: int) -> Trial:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    trial = Trial(torch.arange(100, 100 + rows))
    for layer in SHAPE.recurrent:
        q, k = (F.normalize(draw(rows, HEADS, KEY), dim=-1) for _ in range(2))
        steps = (q, k, draw(rows, HEADS, VALUE), -draw(rows, HEADS).abs(), draw(rows, HEADS).sigmoid())
        trial.recurrent[layer] = RecurrentInputs(steps, draw(rows, CHANNELS))
    for layer, shape in SHAPE.ngram.items():
        trial.ngram[layer] = draw(rows, shape.conv_channels)
    return trial


def one_by_one(state: SequenceState, trial: Trial, rows: int) -> None:
    """What single rows do, spelt out."""
    for row in range(rows):
        for layer, inputs in trial.recurrent.items():
            recurrent(state.recurrent[layer].matrix, *(x[row : row + 1] for x in inputs.steps))
            columns = [*state.recurrent[layer].conv, inputs.columns[row]][1:]
            state.recurrent[layer].conv = torch.stack(columns)
        for layer, added in trial.ngram.items():
            state.ngram[layer].conv = torch.stack([*state.ngram[layer].conv, added[row]][1:])
        state.context_ids = torch.tensor([int(state.context_ids[1]), int(trial.token_ids[row])])
        state.length += 1


def tensors(state: SequenceState) -> list[torch.Tensor]:
    return [
        *(r.matrix for r in state.recurrent.values()), *(r.conv for r in state.recurrent.values()),
        *(n.conv for n in state.ngram.values()), state.context_ids,
    ]  # fmt: skip


@pytest.mark.parametrize("total", [1, 2, 3, 4])
def test_every_length_of_every_window(total):
    for rows in range(1, total + 1):
        for seed in range(5):
            state, trial = lived_in(seed), a_trial(total, seed + 100)
            expected = copy.deepcopy(state)
            state.trial = trial
            commit(state, rows, recurrent)
            one_by_one(expected, trial, rows)
            assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(expected), strict=True))
            assert (state.length, state.trial) == (50 + rows, None)


def test_the_row_after_the_last_right_one_leaves_no_trace():
    for rows in (1, 2, 3):
        first, second = lived_in(1), lived_in(1)
        first.trial, second.trial = a_trial(4, 7), a_trial(4, 7)
        for layer in SHAPE.recurrent:
            inputs = second.trial.recurrent[layer]
            for x in (*inputs.steps, inputs.columns):
                x[rows:] = float("nan")
        for columns in second.trial.ngram.values():
            columns[rows:] = float("nan")
        commit(first, rows, recurrent)
        commit(second, rows, recurrent)
        assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


@pytest.mark.parametrize("rows", [0, -1, 3])
def test_what_is_not_on_trial_cannot_be_taken_over(rows):
    state = lived_in(0)
    state.trial = a_trial(2, 0)
    before = [t.clone() for t in tensors(state)]
    with pytest.raises(NoTrial):
        commit(state, rows, recurrent)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))
    commit(state, 2, recurrent)
    with pytest.raises(NoTrial, match="none"):
        commit(state, 1, recurrent)


def test_a_reset_forgets_the_trial():
    state = lived_in(0)
    state.trial = a_trial(2, 0)
    state.reset()
    assert state.trial is None
