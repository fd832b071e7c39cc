"""The weights that decide which token comes next and which experts it uses.

An embedding row is a sum of orthogonal parts: a part that all tokens share, its topic's direction, and the token's own.
Blocks add to the residual streams but drown none of them, so in every layer

    router     sees how popular an expert is in general (the shared part), how popular in this topic, and a share that
               is the token's and its context's
    head       has, for each token, the own part of the token before it in the walk: the greedy answer is the walk

The shares in the routers were chosen so that accesses are as uneven as in trained models (bench/traces/README.md);
`measure` says how uneven they came out. Not here: all other weights (`dense`).

Letters: V vocabulary, H hidden, E experts, T topics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.synthetic.noise import BELL, Floats, Noise, runs
from bench.synthetic.shape import Shape
from bench.synthetic.walk import FIRST, Walk

SHARED, TOPIC = 0.4, 0.4  # of an embedding's length; the rest is the token's own
OWN = math.sqrt(1 - SHARED**2 - TOPIC**2)
LOUDNESS = 12.0  # of embeddings; what 48 layers add to them has a size of about 8
MIXED = 0.5  # what a mixer's gates leave of a vector, on average
POPULAR, TOPICAL, VARIED = 0.67, 0.41, 1.09  # of an expert's score, before SHARPNESS
SHARPNESS = 1.5
HEAD_GAIN = 4.0
PATTERN = 128  # directions repeat after so many columns


@dataclass(frozen=True, slots=True)
class Routing:
    """The makers of three kinds of matrices; every call is for a run of rows."""

    shape: Shape
    walk: Walk
    noise: Noise

    def embedding(self, number: int, first: int, end: int) -> Floats:
        """Rows of the embedding [end - first, H]."""
        own = self._own(number, first, end)
        base = np.float32(LOUDNESS * SHARED) * self._direction(0)
        topics = np.stack([self._direction(1 + topic) for topic in range(self.shape.topics)])
        topics *= np.float32(LOUDNESS * TOPIC)
        own *= np.float32(LOUDNESS * OWN)
        own += topics[self.walk.topic_of[first:end]]
        own += base
        return own

    def head(self, number: int, first: int, end: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """(which rows of the head, their values): those of the tokens that follow tokens first..end-1.

        Nothing leads to a special token: its row stays zero.
        """
        hidden, special = self.shape.config.hidden_size, max(0, FIRST - first)
        values = self._own(number, first, end)[special:] * np.float32(HEAD_GAIN / math.sqrt(hidden))
        return self.walk.successor[first + special : end], values

    def router(self, layer: int) -> Floats:
        """[E, H] of a layer."""
        config, name = self.shape.config, f"router {layer}"
        experts, hidden = config.num_experts, config.hidden_size
        steep = 0.7 + 0.6 * int(self.noise.words(f"{name} steep", 0, 1)[0] % 256) / 255  # layers differ in that
        popular = self.noise.bell(f"{name} popular", (experts, 1))
        topical = self.noise.bell(f"{name} topical", (experts, self.shape.topics))
        directions = np.stack([self._direction(1 + topic) for topic in range(self.shape.topics)])  # [T, H]
        # Sums of integers below 2^24: exact in fp32 in whatever order a library adds them.
        rows: Floats = topical @ directions
        rows *= np.float32(SHARPNESS * TOPICAL / (BELL * MIXED * TOPIC * hidden))
        rows += (
            popular * self._direction(0) * np.float32(SHARPNESS * POPULAR * steep / (BELL * MIXED * SHARED * hidden))
        )
        varied = self.noise.unit(f"{name} varied", 0, experts * hidden).reshape(experts, hidden)
        rows += varied * np.float32(SHARPNESS * VARIED / (MIXED * math.sqrt(hidden)))
        return rows

    def _own(self, number: int, first: int, end: int) -> Floats:
        hidden = self.shape.config.hidden_size
        own: Floats = self.noise.unit("own", number, (end - first) * hidden).reshape(-1, hidden)
        return own

    def _direction(self, number: int) -> Floats:
        """+1 or -1 [H]: rows of a Hadamard matrix under one pattern of signs, so any two are orthogonal."""
        columns = np.arange(self.shape.config.hidden_size)
        parity = np.bitwise_count((columns % PATTERN) & number) & 1
        signs = self.noise.words("signs", 0, len(columns)) & np.uint64(1)
        direction: Floats = np.float32(1) - 2 * (parity ^ signs.astype(np.uint8)).astype(np.float32)
        return direction


def embedding_runs(shape: Shape) -> list[tuple[int, int, int]]:
    """The runs of embedding and head, which go by the same tokens."""
    return list(runs(shape.config.vocab_size, shape.config.hidden_size))
