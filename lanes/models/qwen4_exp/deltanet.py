"""The Gated DeltaNet block: projections, short convolution, delta rule, gated norm.

    qkv = silu(conv4(W u));  q, k l2-normalised per head, q / sqrt(K);  each k head serves N / key_heads v heads
    beta = sigmoid(b);  g = -exp(A_log) softplus(a + dt_bias)
    out  = W_o (rms(o) * w * gate(z))            w is centred on 1 here, unlike every other norm

Not here: the rule itself (`delta_rule`). b and a steer an exponential, so their matrix stays fp32.

Letters: R rows, T rows of a run, N value heads, K key size, V value size, C channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from lanes.models.delta_rule import delta_rule, recurrent
from lanes.models.ops import causal_conv, product, rms
from lanes.models.qwen4_exp.rows import Rows
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import RecurrentState
from lanes.state.trial import RecurrentInputs

L2_EPS = 1e-6
SLICE_ROWS = 2048  # of a long window at once: their projection is half as large again as their streams


class Kernels(Protocol):
    """What computes one sequence's rows around and in the rule, in this module's place."""

    def rows(self, qkv: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [R, A, K] of the key heads and v [R, N, V], behind convolution and norm; moves the tail on."""
        ...

    def rule(
        self, matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """As `lanes.models.delta_rule.delta_rule`, for key heads that serve several value heads each."""
        ...

    def finish(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """[R, N * V], as the product behind it wants it."""
        ...


class DeltaNet:
    """One layer's Gated DeltaNet."""

    def __init__(self, spec: Spec, weights: Weights, layer: int) -> None:
        self._spec, self.layer = spec, layer
        wide = spec.value_heads * spec.value_dim
        self.inputs = weights.matrix(
            ("in_proj_qkv.weight", spec.conv_channels), ("in_proj_z.weight", wide), columns=spec.hidden
        )
        self.gates = weights.matrix(
            ("in_proj_b.weight", spec.value_heads),
            ("in_proj_a.weight", spec.value_heads),
            columns=spec.hidden,
            dtype=torch.float32,
        )
        taps = weights.vector("conv1d.weight", spec.conv_channels, 1, spec.conv_taps)
        self.filter = taps.squeeze(1).t().contiguous()  # [T, C]
        self.taps = self.filter.unbind()
        self.rate = -weights.vector("A_log", spec.value_heads).exp()
        self.shift = weights.vector("dt_bias", spec.value_heads)
        self._shifts = F.pad(self.shift, (spec.value_heads, 0))  # of b and a
        self.norm = weights.vector("norm.weight", spec.value_dim)
        self.output = weights.matrix(("out_proj.weight", spec.hidden), columns=wide)
        self.kernels: Kernels | None = None

    def __call__(self, u: torch.Tensor, rows: Rows) -> torch.Tensor:
        """u, result: fp32 [R, H]."""
        spec = self._spec
        # Still side by side: an exponential over rows with a gap between them goes row by row, however many there are.
        b, a = (product(u, self.gates) + self._shifts).chunk(2, dim=1)  # [R, N]
        beta, g = b.sigmoid(), self.rate * F.softplus(a)
        if self.kernels is not None and len(rows.runs) == 1 and rows.runs[0].trial is None:
            state, slices = rows.runs[0].state.recurrent[self.layer], (x.split(SLICE_ROWS) for x in (u, g, beta))
            return torch.cat([self._by(self.kernels, state, *some) for some in zip(*slices, strict=True)])
        qkv, z = self._projected(u)
        q, k, v = self._convolved(qkv, rows)
        parts = []  # [T, N, V] each
        for run in rows.runs:
            part = run.rows
            matrix, steps = run.state.recurrent[self.layer].matrix, (q[part], k[part], v[part], g[part], beta[part])
            if run.trial is None:
                parts.append(delta_rule(matrix, *steps))
            else:
                parts.append(recurrent(run.trial.copy_of(matrix), *steps))
                run.trial.recurrent[self.layer] = RecurrentInputs(steps, qkv[part])
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        gate = z.view_as(out)
        gate = gate.sigmoid() if spec.gate == "sigmoid" else F.silu(gate)
        out = (rms(out, spec.eps) * self.norm).mul_(gate)
        return product(out.flatten(1), self.output)

    def _projected(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv [R, C] and z [R, N * V]."""
        spec = self._spec
        qkv, z = product(u, self.inputs).split((spec.conv_channels, spec.value_heads * spec.value_dim), dim=1)
        return qkv, z

    def _by(
        self, kernels: Kernels, state: RecurrentState, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Some rows' result by kernels."""
        qkv, z = self._projected(u)
        out = kernels.rule(state.matrix, *kernels.rows(qkv, state.conv), g, beta)
        return product(kernels.finish(out, z), self.output)

    def _convolved(self, qkv: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [R, N, K] and v [R, N, V] behind convolution and norm; moves the states' tails on."""
        spec = self._spec
        mixed = torch.empty_like(qkv)
        for run in rows.runs:
            tail = run.state.recurrent[self.layer].conv
            columns = torch.cat((tail, qkv[run.rows]))
            mixed[run.rows] = causal_conv(columns, self.taps)
            if run.trial is None:
                tail.copy_(columns[-tail.shape[0] :])
        mixed = F.silu(mixed, inplace=True)
        wide = spec.key_heads * spec.key_dim
        keys, v = mixed.split((2 * wide, spec.value_heads * spec.value_dim), dim=1)
        keys = keys.reshape(-1, 2, spec.key_heads, spec.key_dim)
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + L2_EPS)
        keys = keys.repeat_interleave(spec.value_heads // spec.key_heads, dim=2)  # [R, 2, N, K]
        return keys[:, 0] * spec.key_dim**-0.5, keys[:, 1], v.reshape(-1, spec.value_heads, spec.value_dim)
