"""An n-gram block of a window. Its convolution's tail lags one window behind, as DeltaNet's state does.

There is one such layer or none, so torch's operations do; all of them have fixed shapes.
Letters: R rows, S streams, H hidden, B columns of the tail.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lanes.models.ops import causal_conv, rms
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
        self._places = torch.arange(state.conv.shape[0], device=device)  # [B]

    def run(self, a: Activations) -> None:
        """The streams gain the last block's result, whose injection is then zero, and the layer's."""
        spec, block, rows = self._spec, self._block, a.x.shape[0]
        x = whole_streams(a)
        self.settle()
        self._rounded.copy_(self._embedded)
        projected = self._key_value[:rows]
        multiply(self._rounded[:rows], block.key_value, projected)
        key, value = projected.split((spec.streams * spec.hidden, spec.hidden), dim=1)
        key = rms(key.unflatten(1, (spec.streams, spec.hidden)), spec.eps) * block.norm_key
        gate = (key * (rms(x, spec.eps) * block.norm_query)).sum(-1, keepdim=True) / math.sqrt(spec.hidden)
        gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()
        gated = gate.sigmoid() * value[:, None, :]  # [R, S, H]
        self._pending[:rows] = (rms(gated, spec.eps) * block.norm_conv).flatten(1)
        columns = torch.cat((self._tail, self._pending[:rows]))
        x += gated
        x += F.silu(causal_conv(columns, block.taps, spec.ngram_order)).view_as(x)

    def tensors(self) -> list[torch.Tensor]:
        """What is kept of the last window's rows; nothing of it is needed once they are settled."""
        return [self._rounded, self._key_value, self._pending]

    def settle(self) -> None:
        """Brings the accepted rows into the tail."""
        together = torch.cat((self._tail, self._pending))
        self._tail.copy_(together.index_select(0, self._places + self._accepted))
