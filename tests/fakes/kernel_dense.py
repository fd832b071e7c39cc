"""Cases of the small kernels between products, against the model's own blocks."""

from __future__ import annotations

import numpy as np
import torch

from lanes.kernels import naive, ngram, sampling, stream
from lanes.kernels.normed import normed
from lanes.models.ops import rms
from lanes.models.qwen4_exp.ngram import LEAST_GATE
from lanes.philox import uniform
from lanes.sampler import greedy

NOT_A_NUMBER = float("nan")


def _random(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def check_enter(device: str, rows: int, streams: int, hidden: int) -> None:
    """A block's result into the streams, and their norms."""
    rng = np.random.default_rng(rows)
    x, result, injection = _random(rng, rows, streams, hidden), _random(rng, rows, hidden), _random(rng, rows, streams)
    norm = _random(rng, streams, hidden)
    want_x = x + injection[:, :, None] * result[:, None, :]
    want_n = rms(want_x, 1e-6) * norm
    got_x, normed = x.clone().to(device), torch.full(x.shape, NOT_A_NUMBER, device=device)
    rounded = torch.full(x.shape, NOT_A_NUMBER, dtype=torch.bfloat16, device=device)
    stream.enter(got_x, result.to(device), injection.to(device), norm.to(device), normed, rounded, 1e-6)
    for got, want in ((got_x, want_x), (normed, want_n)):
        torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=2e-6)
    step = 2**-7 if device == "cpu" else 2**-8  # the interpreter cuts bf16 off where a GPU rounds
    torch.testing.assert_close(rounded.float(), normed, rtol=step, atol=0)


def check_normed(device: str, rows: int, width: int) -> None:
    """Rows of very different size, in both types."""
    rng = np.random.default_rng(width)
    x, weight = _random(rng, rows, width) * 10.0 ** torch.arange(rows)[:, None], _random(rng, width)
    want = rms(x, 1e-6) * weight
    for dtype, step in ((torch.float32, 2e-5), (torch.bfloat16, 2**-7 if device == "cpu" else 2**-8)):
        out = torch.full((rows + 1, width), NOT_A_NUMBER, dtype=dtype, device=device)
        normed(x.to(device), weight.to(device), out[:rows], 1e-6)
        torch.testing.assert_close(out[:rows].float().cpu(), want, rtol=step, atol=1e-6)
        assert out[rows:].isnan().all()


def check_ngram(device: str, streams: int, hidden: int, taps: int, dilation: int) -> None:
    """Windows of all sizes one after another, of which some rows are accepted: tail and streams as the naive twin has
    them."""
    rng = np.random.default_rng(hidden + taps)
    wide, behind = streams * hidden, (taps - 1) * dilation
    norms = tuple(_random(rng, streams, hidden) for _ in range(3))
    there = tuple(norm.to(device) for norm in norms)
    filter, tail = _random(rng, taps, wide), _random(rng, behind, wide)
    ours, pending = tail.to(device, copy=True), torch.full((4, wide), NOT_A_NUMBER, device=device)
    accepted = torch.zeros(1, dtype=torch.int32, device=device)
    for rows, right in ((1, 1), (4, 2), (3, 0), (2, 2), (4, 4), (1, 1)):
        x, key_value = _random(rng, rows, streams, hidden), _random(rng, rows, wide + hidden)
        key_value[0, :hidden] = 0.0  # a gate of zero
        got = x.to(device, copy=True)
        ngram.settle(ours, pending, accepted)
        torch.testing.assert_close(ours.cpu(), tail, rtol=2e-5, atol=2e-6)
        ngram.gate(got, key_value.to(device), there, pending, 1e-6, LEAST_GATE)
        ngram.convolve(got.flatten(1), ours, pending, filter.to(device), dilation)
        rest = naive.ngram(x, key_value, norms, tail, filter, dilation, 1e-6, LEAST_GATE)
        torch.testing.assert_close(got.cpu(), x, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(pending[:rows].cpu(), rest, rtol=2e-5, atol=2e-6)
        tail, accepted[0] = torch.cat((tail, rest[:right]))[right:], right


def check_likeliest(device: str, rows: int, vocabulary: int) -> None:
    """The same ids as `greatest`; their probabilities as softmax has them, of flat rows and of steep ones."""
    rng = np.random.default_rng(vocabulary)
    logits = (_random(rng, rows, vocabulary) * torch.logspace(-2, 2, rows)[:, None]).to(device)
    ids, share = torch.full((rows,), -5, dtype=torch.int64, device=device), torch.zeros(rows, device=device)
    blocks = sampling.blocks(vocabulary)
    scratch = torch.full((rows, blocks), -1, dtype=torch.int64, device=device)
    sums = torch.full((rows, 2, blocks), NOT_A_NUMBER, device=device)
    sampling.likeliest(logits, scratch, sums, ids, share)
    assert ids.tolist() == _greatest(device, logits.cpu().numpy())
    want = logits.cpu().double().softmax(1).amax(1).float()
    torch.testing.assert_close(share.cpu(), want, rtol=2e-5, atol=0)
    logits[0, vocabulary // 2] = NOT_A_NUMBER
    sampling.likeliest(logits, scratch, sums, ids, share)
    assert ids[0] == -1


def check_greatest(device: str, rows: int, vocabulary: int) -> None:
    """Ties, signed zeros and the ends of the range, in every block, as numpy finds them."""
    rng = np.random.default_rng(vocabulary)
    most = np.finfo(np.float32).max
    logits = rng.choice(np.float32([-1.0, -0.0, 0.0, 3.5]), (rows, vocabulary), p=[0.5, 0.3, 0.195, 0.005])
    logits[0] = -most
    logits[0, vocabulary - 2 :] = np.float32([-7.0, -7.0])
    if rows > 1:
        logits[1] = -np.abs(logits[1])  # at most a zero of either sign
    if rows > 2:
        logits[2, vocabulary // 3] = most
    want = np.argmax(logits, axis=1)
    assert _greatest(device, logits) == want.tolist() == greedy(logits).tolist()
    for bad in (np.inf, -np.inf, np.nan, -np.float32(np.nan)):
        for place in (0, vocabulary // 2, vocabulary - 1):
            poisoned, row = logits.copy(), place % rows
            poisoned[row, place] = bad
            want[row] = -1
            assert _greatest(device, poisoned) == want.tolist() == greedy(poisoned).tolist()
            want = np.argmax(logits, axis=1)


def _greatest(device: str, logits: np.ndarray) -> list[int]:
    rows, vocabulary = logits.shape
    out = torch.full((rows,), -5, dtype=torch.int64, device=device)
    scratch = torch.full((rows, sampling.blocks(vocabulary)), -1, dtype=torch.int64, device=device)
    sampling.greatest(torch.from_numpy(logits).to(device), scratch, out)
    return out.tolist()


def check_uniform(device: str) -> None:
    """Every bit of lanes.philox, at the ends of seeds and positions too."""
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 262_143, 2**32 - 1, 2**32, 2**62, 17]
    signed = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).to(device)
    out = torch.full((6,), NOT_A_NUMBER, dtype=torch.float64, device=device)
    sampling.uniform(signed, torch.tensor(positions, device=device), out)
    assert out.cpu().tolist() == [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
