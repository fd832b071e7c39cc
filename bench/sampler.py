"""What a token costs between the logits and its id, at a true vocabulary, as a multiple of one argmax over the row.

Every candidate runs once in each round and medians over rounds are compared, so a noisy neighbour hits all alike; times
are of this thread's CPU, so waiting for a core does not count.
The row is peaked as a language model's is: a bulk, and two hundred tokens above it. One is flat: the worst case.
Not here: correctness (tests/unit/test_sampler.py, test_penalties.py).

    python -m bench.sampler --out bench/results/sampler.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.result import frame, write
from lanes.penalties import Penalties
from lanes.request import Request, Sampling
from lanes.sampler import choose, logprobs

VOCAB, CONTEXT = 248_320, 32_768
WARM_UP_ROUNDS = 3

SETTINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(1.0),
    "top-k 40": Sampling(1.0, 40),
    "0.7, top-k 20, top-p 0.8": Sampling(0.7, 20, 0.8),
    "top-p 0.95": Sampling(1.0, 0, 0.95),
    "min-p 0.05": Sampling(1.0, min_p=0.05),
}
PENALTIES = {
    "presence and frequency, 1,000 tokens of output": Sampling(presence_penalty=0.5, frequency_penalty=0.2),
    "repetition, 32,768 tokens of prompt": Sampling(repetition_penalty=1.1),
    "300 biases": Sampling(logit_bias=tuple((token, 1.0) for token in range(300))),
    "min tokens": Sampling(min_tokens=2000),
}


def rows() -> dict[str, np.ndarray]:
    """The two kinds of logits."""
    rng = np.random.default_rng(1)
    flat = rng.standard_normal(VOCAB, np.float32)
    peaked = 3 * flat
    peaked[rng.integers(0, VOCAB, 200)] += np.linspace(6, 20, 200, dtype=np.float32)
    return {"peaked": peaked, "flat": flat}


def candidates(row: np.ndarray, flat: np.ndarray) -> dict[str, Callable[[], object]]:
    """Everything that is timed."""
    found: dict[str, Callable[[], object]] = {"argmax": row.argmax}
    found |= {name: partial(choose, row, sampling, 5) for name, sampling in SETTINGS.items()}
    found["top-p 0.95, flat row"] = partial(choose, flat, Sampling(1.0, 0, 0.95), 5)
    rng = np.random.default_rng(2)
    prompt = tuple(rng.integers(0, VOCAB, CONTEXT).tolist())
    for name, sampling in PENALTIES.items():
        penalties = Penalties(Request("r", prompt, 2000, sampling, frozenset({1, 2})), VOCAB)
        for token in rng.integers(0, VOCAB, 1000).tolist():
            penalties.add(token)
        found[name] = partial(penalties.row, row)
    found["log-probabilities, 5 best"] = partial(logprobs, row, 3, 5)
    return found


def main(arguments: list[str]) -> None:
    """Times them and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    made = rows()
    timed = candidates(made["peaked"], made["flat"])
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds + WARM_UP_ROUNDS):
        for name, run in timed.items():
            began_ns = time.thread_time_ns()
            run()
            if number >= WARM_UP_ROUNDS:
                samples[name].append((time.thread_time_ns() - began_ns) / 1000)
    argmax = samples["argmax"]
    result = frame(
        "bench.sampler", arguments, pack={}, conditions={"vocabulary": VOCAB, "rounds": options.rounds},
        packages=("numpy",),
    )  # fmt: skip
    result["median_us"] = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    result["times_argmax"] = {
        name: round(statistics.median(value / one for value, one in zip(values, argmax, strict=True)), 2)
        for name, values in samples.items()
    }
    write(result, options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
