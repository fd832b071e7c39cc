"""The Gated DeltaNet block: projections, short convolution, delta rule, gated norm.

Letters: B sequences, T tokens, N value heads, K key size, V value size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.delta_rule import delta_rule
from deploy.demo_model.model.parts import Taps, linear, working

STEP_RANGE = (1e-3, 1e-1)  # of softplus(dt_bias) at the start: heads that forget within ten to a thousand tokens


class UnitNorm(nn.Module):
    """The weight of the gated norm, centred on one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class DeltaNet(nn.Module):
    """One layer's Gated DeltaNet."""

    def __init__(self, c: TinyConfig, out_gain: float) -> None:
        super().__init__()
        self._key_heads, self._heads, self._eps = c.linear_num_key_heads, c.linear_num_value_heads, c.rms_norm_eps
        self._key_dim, self._value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        keys, values = self._key_heads * self._key_dim, self._heads * self._value_dim
        self._split = (keys, keys, values)
        self.in_proj_qkv = linear(c.hidden_size, 2 * keys + values)
        self.in_proj_z = linear(c.hidden_size, values)
        self.in_proj_b = linear(c.hidden_size, self._heads)
        self.in_proj_a = linear(c.hidden_size, self._heads)
        self.conv1d = Taps(2 * keys + values, c.linear_conv_kernel_dim, 1, 0.5)
        low, high = (math.log(step) for step in STEP_RANGE)
        step = torch.exp(torch.rand(self._heads) * (high - low) + low)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back
        self.A_log = nn.Parameter(torch.empty(self._heads).uniform_(1, 16).log())
        self.norm = UnitNorm(self._value_dim)
        self.out_proj = linear(values, c.hidden_size, out_gain)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """u, result: [B, T, H]."""
        q, k, v = F.silu(self.conv1d(self.in_proj_qkv(u))).split(self._split, -1)
        with torch.autocast(u.device.type, enabled=False):
            q, k = (self._unit(x.float().unflatten(-1, (self._key_heads, -1))) for x in (q, k))
            v = v.float().unflatten(-1, (self._heads, -1)).transpose(1, 2)  # [B, N, T, V]
            u32 = u.float()
            beta = F.linear(u32, self.in_proj_b.weight).sigmoid().transpose(1, 2)
            step = F.linear(u32, self.in_proj_a.weight).transpose(1, 2) + self.dt_bias[:, None]  # [B, N, T]
            g = -self.A_log.exp()[:, None] * F.softplus(step)
            out = delta_rule(q * self._key_dim**-0.5, k, v, g, beta)
            out = F.rms_norm(out.transpose(1, 2), (self._value_dim,), None, self._eps)
        out = working(out * self.norm.weight)
        gate = self.in_proj_z(u).sigmoid()
        return self.out_proj(out.flatten(2) * gate)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(self._heads // self._key_heads, 2).transpose(1, 2)  # [B, N, T, K]
