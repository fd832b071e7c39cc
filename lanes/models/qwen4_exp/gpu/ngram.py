"""An n-gram block of a window. Its convolution's tail lags one window behind, as DeltaNet's state does.

Letters: R rows, S streams, H hidden, B rows of the tail.
"""

from __future__ import annotations

import torch

from lanes.kernels import ngram
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, multiply, whole_streams
from lanes.models.qwen4_exp.ngram import LEAST_GATE, NgramLayer
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import NgramState


class NgramWindow:
    """Twin of `lanes.models.qwen4_exp.ngram.NgramLayer`; `state` lies in the seat."""

    def __init__(
        self, block: NgramLayer, spec: Spec, state: NgramState, accepted: torch.Tensor, embedded: torch.Tensor
    ):
        """embedded fp32 [4, D]: a window's rows of the table, put there before it runs."""
        self._block, self._spec, self._tail, self._accepted = block, spec, state.conv, accepted
        device = state.conv.device
        self._embedded = embedded
        self._rounded = torch.zeros(embedded.shape, dtype=block.key_value.dtype, device=device)
        self._key_value = torch.zeros((MOST_ROWS, block.key_value.shape[0]), device=device)
        self._pending = torch.zeros((MOST_ROWS, state.conv.shape[1]), device=device)  # normed rows of the last window
        self._taps = torch.stack(list(block.taps))  # [T, S * H]

    def run(self, a: Activations) -> None:
        """The streams gain the last block's result, whose injection is then zero, and the layer's."""
        spec, block, rows = self._spec, self._block, a.x.shape[0]
        x = whole_streams(a)
        self.settle()
        self._rounded.copy_(self._embedded)
        multiply(self._rounded[:rows], block.key_value, self._key_value[:rows])
        norms = block.norm_key, block.norm_query, block.norm_conv
        ngram.gate(x, self._key_value[:rows], norms, self._pending, spec.eps, LEAST_GATE)
        ngram.convolve(x.flatten(1), self._tail, self._pending, self._taps, spec.ngram_order)

    def tensors(self) -> list[torch.Tensor]:
        """What is kept of the last window's rows; nothing of it is needed once they are settled."""
        return [self._rounded, self._key_value, self._pending]

    def settle(self) -> None:
        """Brings the accepted rows into the tail."""
        ngram.settle(self._tail, self._pending, self._accepted)
