"""Which experts a synthetic model's routers choose along its walk, without running the model: for replays of policies.

What a router sees is the token's embedding and what the blocks before it added. The embeddings and the routers are the
model's own; what blocks add is drawn at random, fresh for every token, growing with the layers to BLOCKS at the last.
With that a stretch of 1,856 tokens from the start of the walk comes out as a lane on a GPU recorded it at the true
shape: the hottest tenth takes 60.4 % (60.3), with a tenth resident the lanes' policy hits 64.5 % (64.7), a fixed set
52 % (54).

Not here: what lanes recorded (lanes.experts.trace). A float's last bit may move a choice: nothing is frozen.

Letters: T tokens, L layers, K experts chosen, H hidden.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bench.synthetic.noise import Noise
from bench.synthetic.routing import MIXED, Routing, embedding_runs
from bench.synthetic.shape import Shape
from bench.synthetic.walk import walk

BLOCKS = 6.0  # root mean square of what all blocks together add; an embedding's is 12


def routed(shape: Shape, seed: int, start: int, tokens: int) -> npt.NDArray[np.int64]:
    """Keys (layer * experts + expert) of every token, ascending: [T, L * K]."""
    config = shape.config
    routing = Routing(shape, walk(config.vocab_size, shape.topics), Noise(seed))
    rows = _embeddings(routing, np.array(routing.walk.stretch(start, tokens)))
    keys = np.empty((tokens, config.num_hidden_layers, config.num_experts_per_tok), np.int64)
    for layer in range(config.num_hidden_layers):
        added = routing.noise.unit(f"blocks {layer}", start, rows.size).reshape(rows.shape)
        added *= np.float32(BLOCKS * math.sqrt((layer + 1) / config.num_hidden_layers))
        added += rows
        added *= MIXED / np.sqrt(np.mean(added * added, axis=1, keepdims=True))
        scores = added @ routing.router(layer).T
        best = np.argpartition(scores, -keys.shape[2], axis=1)[:, -keys.shape[2] :]
        keys[:, layer] = np.sort(best, axis=1) + layer * config.num_experts
    return keys.reshape(tokens, -1)


def _embeddings(routing: Routing, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[T, H] of these tokens."""
    found = np.empty((len(ids), routing.shape.config.hidden_size), np.float32)
    for number, first, end in embedding_runs(routing.shape):
        here = np.flatnonzero((ids >= first) & (ids < end))
        if len(here):
            found[here] = routing.embedding(number, first, end)[ids[here] - first]
    return found
