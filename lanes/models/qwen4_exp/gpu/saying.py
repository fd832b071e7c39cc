"""What the host says to a decode window, written as arrays.

Between two windows code and data are cold: a tensor operation of one row takes ten to twenty-five microseconds there,
an array's one to four. So nothing here is a tensor's. Not here: where it is written to (inputs), what is computed from
it (window).

Invariant: nothing is written while a window that reads it runs; n-gram rows may follow while its first part does.

Letters: R rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from lanes.errors import NativeKernelUnavailable
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS
from lanes.models.qwen4_exp.gpu.angles import Places
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.ngram import NgramLayer
from lanes.models.qwen4_exp.rows import Rotary

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Saying:
    """Of one lane."""

    def __init__(self, said: Inputs, model: Qwen4Exp) -> None:
        """`said` is in host memory, as the model's embedding is."""
        self._length, self._accepted, self._embedded, self._angles, ngrams = (
            part.numpy() for part in (said.length, said.accepted, said.embedded, said.angles, said.ngram)
        )
        spec, before = model.spec, model.state_shape.context_ids
        self._tokens = np.zeros(before + MOST_ROWS, np.int64)
        self._context, self._new = self._tokens[:before], self._tokens[before:]
        self._layers = [
            (layer, _bound(layer, self._tokens, rows), rows) for layer, rows in zip(model.ngrams, ngrams, strict=True)
        ]
        self._places = Places(
            Rotary(spec.rotary_dim, spec.rope_theta, torch.device("cpu")), spec.index_block_tokens, MOST_ROWS
        )
        self._embedding = HostRows(model.embedding)

    def accepted(self, rows: int) -> None:
        """So many rows of the last window belong to the sequence."""
        self._accepted[0] = rows

    def begin(self, ids: Ids, length: int, accepted: int) -> None:
        """A window of tokens [R] begins, after `length` others; `accepted` rows of the last one belong to them."""
        self._length[0], self._accepted[0] = length, accepted
        rows = ids.shape[0]
        self._embedding.into(ids, self._embedded[:rows])
        self._places.into(self._angles, length, rows)

    def ngrams(self, context: Ids, ids: Ids) -> None:
        """What its n-gram layers read: rows of the tokens [R] that come after `context`."""
        rows = len(ids)
        self._context[:] = context
        self._new[:rows] = ids
        for layer, say, said in self._layers:
            if say is None or not say(rows):
                said[:rows] = layer.rows_of(self._tokens[: len(context) + rows])

    def count(self) -> None:
        """Once there is time: what `ngrams` has read is counted."""
        for layer, _, _ in self._layers:
            layer.table.count()

    def erase(self) -> None:
        """Zeroes what is kept of the last window's tokens; `said` is its owner's."""
        self._tokens.fill(0)


def _bound(layer: NgramLayer, tokens: Ids, said: Floats) -> Callable[[int], bool] | None:
    """None where nothing native is built: the layer is asked in its own way."""
    try:
        return layer.bound(tokens, said)
    except NativeKernelUnavailable:
        return None


class HostRows:
    """Rows of a matrix [V, H] in host memory, bf16 or fp32, as fp32."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._halves = matrix.dtype == torch.bfloat16
        self._matrix = matrix.view(torch.int16).numpy().view(np.uint16) if self._halves else matrix.numpy()
        assert self._halves or self._matrix.dtype == np.float32

    def into(self, ids: Ids, out: npt.NDArray[np.float32]) -> None:
        """out fp32 [R, H] = the rows ids [R]."""
        rows = self._matrix[ids] if len(ids) > 1 else self._matrix[ids[0]]  # where it lies, half the time of a gather
        if self._halves:
            np.left_shift(rows, 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[:] = rows
