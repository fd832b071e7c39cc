"""A Gated DeltaNet block of a window. Its state lags one window behind (lanes.kernels.deltanet).

Letters: R rows, N value heads, V value size, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.kernels import delta_step
from lanes.kernels.deltanet import DeltaRows, DeltaShape, finish, prepare, rule
from lanes.kernels.products import FEW_ROWS, two_products
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, Narrowing, leave_block
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import RecurrentState


@dataclass(frozen=True, slots=True)
class DeltaActivations(Narrowing):
    """Shared by all layers."""

    projected: torch.Tensor  # fp32 [R, C + N * V]: qkv, z
    gates: torch.Tensor  # fp32 [R, 2N]: b, a
    out: torch.Tensor  # fp32 [R, N, V]
    gated_rounded: torch.Tensor  # [R, N * V]
    readers: torch.Tensor  # int32 [R, A], of which one row counts

    @classmethod
    def of(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> DeltaActivations:
        """For the most rows."""
        heads, value = spec.value_heads, spec.value_dim

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((MOST_ROWS, *shape), dtype=dtype, device=device)

        return cls(
            room(spec.conv_channels + heads * value), room(2 * heads), room(heads, value),
            room(heads * value, dtype=dtype), room(spec.key_heads, dtype=torch.int32),
        )  # fmt: skip


def delta_shape(spec: Spec) -> DeltaShape:
    """Sizes for the kernels."""
    return DeltaShape(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.conv_taps)


def delta_rows(shape: DeltaShape, device: torch.device) -> DeltaRows:
    """Rows for the rule, of the most rows."""
    return DeltaRows(
        *(torch.zeros((MOST_ROWS, n), device=device) for n in (shape.channels, shape.value_heads, shape.value_heads))
    )


class DeltaNetWindow:
    """Twin of `lanes.models.qwen4_exp.deltanet.DeltaNet`; `state` lies in the seat."""

    def __init__(self, block: DeltaNet, spec: Spec, state: RecurrentState, replay: DeltaRows, accepted: torch.Tensor):
        self._block, self._state, self._replay, self._accepted = block, state, replay, accepted
        self._shape, self._silu, self._eps = delta_shape(spec), spec.gate == "silu", spec.eps
        self._most_at_once = FEW_ROWS if delta_step.serves(self._shape) else 0
        device = state.matrix.device
        self._taps = torch.stack(list(block.taps))  # [T, C]
        self._pending = delta_rows(self._shape, device)
        self._raw = torch.zeros((MOST_ROWS, self._shape.channels), device=device)

    def run(self, a: Activations, d: DeltaActivations) -> None:
        """From u to the block's result."""
        block = self._block
        two_products(a.u_rounded, block.inputs, d.projected, a.u, block.gates, d.gates)
        self._advance(d)
        leave_block(d.gated_rounded, block.output, a)

    def settle(self, d: DeltaActivations) -> None:
        """Brings the accepted rows into the state; the one row of `d`, whatever it is, is never accepted."""
        d.projected.zero_()
        d.gates.zero_()
        self._advance(d)

    def tensors(self) -> list[torch.Tensor]:
        """What is kept of the last window's rows; nothing of it is needed once they are settled."""
        return [self._raw, self._pending.mixed, self._pending.decay, self._pending.beta]

    def _advance(self, d: DeltaActivations) -> None:
        block, shape = self._block, self._shape
        if len(d.out) <= self._most_at_once:
            delta_step.step(
                shape, d.projected, d.gates, self._taps, block.rate, block.shift, block.norm, self._eps,
                self._state.conv, self._accepted, self._raw, self._pending, self._state.matrix, d.readers[0],
                d.gated_rounded, silu=self._silu,
            )  # fmt: skip
            return
        prepare(
            shape, d.projected[:, : shape.channels], d.gates, self._taps, block.rate, block.shift, self._state.conv,
            self._accepted, self._raw, self._pending, self._replay,
        )  # fmt: skip
        rule(shape, self._state.matrix, self._accepted, self._replay, self._pending, d.out)
        z = d.projected[:, shape.channels :]
        finish(d.out, z, block.norm, d.gated_rounded, self._eps, silu=self._silu)
