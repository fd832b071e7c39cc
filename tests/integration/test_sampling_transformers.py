"""Our distribution against the one that transformers' own processors give, in their own order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from lanes.penalties import Penalties
from lanes.request import Request, Sampling
from tests.fakes.naive_sampler import naive_distribution

VOCAB, STOP = 60, 7


def theirs(row: np.ndarray, request: Request) -> dict[int, float]:
    sampling = request.sampling
    ids = torch.tensor([request.prompt_ids])
    prompt_tokens = len(request.prompt_ids) - request.replayed_tokens
    chain = hf.LogitsProcessorList()
    if sampling.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias]))
    chain.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens:
        chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_tokens, sampling.min_tokens, [STOP]))
    chain.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    scores = chain(ids, torch.from_numpy(row.copy())[None])[0]
    probabilities = scores.double().softmax(-1)
    return {token: float(probabilities[token]) for token in range(VOCAB) if math.isfinite(float(scores[token]))}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7, 20, 0.8),
        Sampling(1.0, repetition_penalty=1.3),
        Sampling(1.3, repetition_penalty=0.8, min_p=0.05),
        Sampling(0.9, 0, 0.9, logit_bias=((3, 4.0), (10, -100.0), (59, 0.5)), min_tokens=6),
        Sampling(1.5, 30, 0.95, 0, 0.1, 1.2, logit_bias=((7, 30.0),), min_tokens=4),
        Sampling(0.6, 5, 0.7, 0, 0.02, 2.0, min_tokens=3),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_distributions_are_theirs(sampling: Sampling, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = tuple(int(token) for token in rng.integers(0, VOCAB, 12))
    row = rng.normal(0, 3, VOCAB).astype(np.float32)
    request = Request("r", prompt, 50, sampling, frozenset({STOP}), replayed_tokens=3)
    ours = naive_distribution(Penalties(request, VOCAB).row(row).tolist(), sampling)
    expected = theirs(row, request)
    assert ours.keys() == expected.keys()
    assert ours == pytest.approx(expected, rel=1e-4)
