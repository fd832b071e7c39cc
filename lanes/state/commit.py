"""Taking over the first rows of a trial: every piece of state moves exactly as if only those rows had ever run.

    DeltaNet matrices     the delta rule once more, over the rows' stored inputs: the bits of single rows
    convolution tails     the last columns of (tail, accepted columns); n-gram layers alike
    token ids             the last of (ids, accepted ids)
    keys, values, raw     length alone: rows past it are overwritten before they are read
    block keys            length alone: a block that rejected rows completed is formed anew when it is complete again

Not here: how many rows were right (`lanes.drafts`), the draft layer's rows (it reads what waits when it is asked).
Invariant: with the same inputs, the state afterwards is bit-equal to one that ran the rows one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from lanes.state.errors import NoTrial
from lanes.state.sequence import SequenceState

Rule = Callable[..., object]  # (matrix, q, k, v, g, beta), matrix changed in place: `recurrent` of the delta rule


def commit(state: SequenceState, rows: int, rule: Rule) -> None:
    """Advances the state by the trial's first `rows` rows, at least one, and forgets the trial; raises NoTrial."""
    trial = state.trial
    if trial is None or not 1 <= rows <= trial.rows:
        raise NoTrial(f"{rows} rows cannot be taken over: {trial.rows if trial else 'none'} are on trial")
    for layer, inputs in trial.recurrent.items():
        recurrent = state.recurrent[layer]
        rule(recurrent.matrix, *(x[:rows] for x in inputs.steps))
        shift(recurrent.conv, inputs.columns[:rows])
    for layer, columns in trial.ngram.items():
        shift(state.ngram[layer].conv, columns[:rows])
    shift_ids(state.context_ids.numpy(), trial.token_ids.numpy()[:rows])
    state.length += rows
    state.trial = None


def shift_ids(tail: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> None:
    """`shift` of token ids: of few values, cheaper as arrays."""
    kept = len(tail) - len(new)
    if kept <= 0:
        tail[:] = new[-kept:]
        return
    tail[:kept] = tail[-kept:]
    tail[kept:] = new


def shift(tail: torch.Tensor, new: torch.Tensor) -> None:
    """Moves a tail on: its first rows leave, the new ones come last."""
    together = torch.cat((tail, new))
    tail.copy_(together[together.shape[0] - tail.shape[0] :])
