"""Cases of the DeltaNet kernels: a conversation of windows with rejected rows against one without any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lanes.kernels import delta_step, deltanet, naive
from lanes.kernels.deltanet import DeltaRows, DeltaShape

NOT_A_NUMBER = float("nan")


def check_windows(
    device: str, shape: DeltaShape, windows: Sequence[tuple[int, int]], *, seed: int = 0, one_launch: int = 0
) -> None:
    """(rows, accepted) of each window: every output, and state and tail as if rejected rows had never been. Windows of
    up to `one_launch` rows are computed in one launch."""
    rng = np.random.default_rng(seed)
    heads, value = shape.value_heads, shape.value_dim

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy((rng.standard_normal(size) * scale).astype(np.float32))

    taps, shift = random(shape.taps, shape.channels, scale=0.5), random(heads)
    rate = -random(heads, scale=0.5).exp()
    state = random(heads, shape.key_dim, value, scale=0.3)
    tail = random(shape.taps - 1, shape.channels)
    norm = random(value)

    def rows_of(fill: float) -> DeltaRows:
        return DeltaRows(
            *(torch.full((4, n), fill, device=device) for n in (shape.channels, heads, heads))
        )  # fmt: skip

    pending, replay = rows_of(0.0), rows_of(NOT_A_NUMBER)
    raw = torch.zeros((4, shape.channels), device=device)
    gpu_state, gpu_tail = state.clone().to(device), tail.clone().to(device)
    constants = [t.to(device) for t in (taps, rate, shift)]
    accepted, readers = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, shape.key_heads))
    for rows, kept in [*windows, (1, 0)]:
        qkv, ba, z = random(rows, shape.channels), random(rows, 2 * heads), random(rows, heads * value + 5)
        scratch = state.clone()
        want = naive.delta_window(shape, qkv, ba, taps, rate, shift, tail.clone(), scratch)
        if kept:
            naive.delta_window(shape, qkv[:kept], ba[:kept], taps, rate, shift, tail, state)
        if rows <= one_launch:
            both = torch.cat((qkv, z), dim=1).to(device)
            result = torch.full((rows, heads * value), NOT_A_NUMBER, device=device)
            silu = kept % 2 == 1
            delta_step.step(
                shape, both, ba.to(device), *constants, norm.to(device), 1e-6, gpu_tail, accepted, raw, pending,
                gpu_state, readers, result, silu=silu,
            )  # fmt: skip
            expected = naive.gated_norm(want, z[:, :-5], norm, 1e-6, silu=silu)
            torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-4)
            assert not readers.any()
            accepted.fill_(kept)
            continue
        out = torch.full((rows, heads, value), NOT_A_NUMBER, device=device)
        deltanet.prepare(
            shape, qkv.to(device), ba.to(device), *constants, gpu_tail, accepted, raw, pending, replay
        )  # fmt: skip
        deltanet.rule(shape, gpu_state, accepted, replay, pending, out)
        torch.testing.assert_close(out.cpu(), want, rtol=2e-4, atol=2e-5)
        for silu in (False, True):
            result = torch.full((rows, heads * value), NOT_A_NUMBER, dtype=torch.bfloat16, device=device)
            gate = z[:, :-5]
            deltanet.finish(out, z.to(device)[:, :-5], norm.to(device), result, 1e-6, silu=silu)
            expected = naive.gated_norm(want, gate, norm, 1e-6, silu=silu)
            torch.testing.assert_close(result.cpu().float(), expected, rtol=2e-2, atol=2e-3)
        accepted.fill_(kept)
    # One window behind: the last one, of which nothing is kept, has brought in what the one before accepted.
    torch.testing.assert_close(gpu_state.cpu(), state, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(gpu_tail.cpu(), tail, rtol=0, atol=0)
