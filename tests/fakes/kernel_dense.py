"""Cases of the small kernels between products, against the model's own blocks."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lanes.kernels import heads, sampling, stream
from lanes.models.ops import rms, rotate
from lanes.models.qwen4_exp.rows import Rotary
from lanes.philox import uniform

NOT_A_NUMBER = float("nan")


def _random(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def check_stream(device: str, rows: int, streams: int, hidden: int, lowrank: int, *, injects: bool = True) -> None:
    """One hyper-connection, as lanes.models.qwen4_exp.stream.Mixer and Connected compute it."""
    rng = np.random.default_rng(rows)
    x, result, injection = _random(rng, rows, streams, hidden), _random(rng, rows, hidden), _random(rng, rows, streams)
    norm, width = _random(rng, streams, hidden), lowrank + streams * injects
    down, up = _random(rng, width, streams * hidden) / hidden, _random(rng, streams * hidden, lowrank)

    want_x = x + injection[:, :, None] * result[:, None, :]
    want_n = rms(want_x, 1e-6) * norm
    low = F.linear(want_n.flatten(1), down)
    want_squashed = F.silu(low[:, :lowrank] / streams)
    want_injection = 2 * torch.sigmoid(low[:, lowrank:] / streams)
    lifted = F.linear(want_squashed, up)
    want_u = (lifted.sigmoid().view_as(x) * want_n).mean(1)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(size, NOT_A_NUMBER, dtype=dtype, device=device)

    got_x, normed = x.clone().to(device), empty(rows, streams, hidden)
    rounded = empty(rows, streams, hidden, dtype=torch.bfloat16)
    stream.enter(got_x, result.to(device), injection.to(device), norm.to(device), normed, rounded, 1e-6)
    squashed, new = empty(rows, lowrank), empty(rows, streams)
    stream.squash(low.to(device), squashed, new)
    u, u_rounded = empty(rows, hidden), empty(rows, hidden, dtype=torch.bfloat16)
    stream.mix(lifted.to(device), normed, u, u_rounded)
    for got, want in ((got_x, want_x), (normed, want_n), (squashed, want_squashed), (u, want_u)):
        torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=2e-6)
    step = 2**-7 if device == "cpu" else 2**-8  # the interpreter cuts bf16 off where a GPU rounds
    torch.testing.assert_close(rounded.float(), normed, rtol=step, atol=0)
    torch.testing.assert_close(u_rounded.float(), u, rtol=step, atol=0)
    if injects:
        torch.testing.assert_close(new.cpu(), want_injection, rtol=2e-5, atol=2e-6)
    else:
        assert new.isnan().all()


def check_norm_rotate(device: str, rows: int, count: int, size: int, rotated: int) -> None:
    """Heads inside a wider projection, written into another layout, as the attention block does it."""
    rng = np.random.default_rng(size)
    wide = _random(rng, rows, count, 2, size)  # query and gate side by side
    norm = _random(rng, size)
    cos, sin = Rotary(rotated, 1e6, torch.device("cpu")).at(torch.arange(rows) * 1000 + 7)
    want = rotate(rms(wide[:, :, 0], 1e-6) * norm, cos[:, None], sin[:, None])
    out = torch.full((count, rows, size), NOT_A_NUMBER, device=device)
    x = wide.to(device)[:, :, 0]
    heads.norm_rotate(x, norm.to(device), cos.to(device), sin.to(device), out.transpose(0, 1), 1e-6)
    torch.testing.assert_close(out.transpose(0, 1).cpu(), want, rtol=2e-5, atol=2e-6)


def check_argmax(device: str, rows: int, vocabulary: int) -> None:
    """Ties, signed zeros, infinities and NaN, in every block, as numpy finds them."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.choice(np.float32([-1.0, -0.0, 0.0, 3.5]), (rows, vocabulary), p=[0.5, 0.3, 0.195, 0.005])
    logits[0] = -np.inf
    logits[0, vocabulary - 2 :] = np.float32([-7.0, -7.0])
    if rows > 1:
        logits[1, vocabulary // 2] = np.inf
    if rows > 2:
        logits[2, vocabulary // 3] = np.nan
    out = torch.full((rows,), -1, dtype=torch.int64, device=device)
    scratch = torch.full((rows, sampling.blocks(vocabulary)), -1, dtype=torch.int64, device=device)
    sampling.argmax(torch.from_numpy(logits).to(device), scratch, out)
    assert out.cpu().tolist() == np.argmax(logits, axis=1).tolist()


def check_uniform(device: str) -> None:
    """Every bit of lanes.philox, at the ends of seeds and positions too."""
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 262_143, 2**32 - 1, 2**32, 2**62, 17]
    signed = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).to(device)
    out = torch.full((6,), NOT_A_NUMBER, dtype=torch.float64, device=device)
    sampling.uniform(signed, torch.tensor(positions, device=device), out)
    assert out.cpu().tolist() == [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
