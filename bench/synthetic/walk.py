"""The frozen conversation of a synthetic model: every token has one successor, and topics drift along the way.

The vocabulary (but for the special tokens) is spread over topics. The walk stays within a topic for SHORTEST to LONGEST
tokens, then half the time goes back to one of the four topics before, as the routing traces do (bench/traces), until
every token was visited; then it begins again. Weights are made so that a greedy answer follows it (`routing`).

Invariant: integers only, so every machine has the same walk; `DIGESTS` of the shapes were committed before any figure
was taken on them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.synthetic.noise import Noise
from bench.tokenizer import SPECIAL_TOKENS

Ints = npt.NDArray[np.int64]

FIRST = len(SPECIAL_TOKENS)
SHORTEST, LONGEST = 150, 500
SEED = 20261130
DIGESTS = {
    "true": "4de6aa640a2850c887e11512876d0bd76f01ad5c920392f1377c826ebd352c66",
    "gigabyte": "443f54a21968d149f1d34b72a5c6246f9435cb5490ee4a97566108b40ee928bf",
    "small": "cd17365ef0887d97b5c74df9f6c6a4ef441b69eaad10b790042163cfc7253a27",
}


@dataclass(frozen=True, slots=True)
class Walk:
    """`order` is the cycle; `topic_of` and `successor` are by token id (special tokens lead to the start)."""

    order: Ints  # [vocabulary - FIRST]
    topic_of: Ints  # [vocabulary]
    successor: Ints  # [vocabulary]

    def stretch(self, start: int, tokens: int) -> list[int]:
        """Token ids from place `start` of the walk on."""
        ids: list[int] = self.order[np.arange(start, start + tokens) % len(self.order)].tolist()
        return ids

    def digest(self) -> str:
        """SHA-256 of the order as little-endian 32-bit words."""
        return hashlib.sha256(self.order.astype("<u4").tobytes()).hexdigest()


def walk(vocabulary: int, topics: int) -> Walk:
    """The walk of a vocabulary."""
    ids = np.arange(FIRST, vocabulary)
    topic_of = np.zeros(vocabulary, np.int64)
    topic_of[FIRST:] = (ids - FIRST) % topics
    noise = Noise(SEED)
    order = np.empty(len(ids), np.int64)
    mixed = ids[np.argsort(noise.words("order", 0, len(ids)), kind="stable")]
    by_topic = mixed[np.argsort(topic_of[mixed], kind="stable")]
    ends = np.cumsum(np.bincount(topic_of[FIRST:], minlength=topics))
    at = np.concatenate(([0], ends[:-1]))  # of each topic, its first token that was not visited
    choices = noise.words("topics", 0, 4 * len(ids))  # more than are ever drawn
    drawn, done = 0, 0
    recent: list[int] = []
    while done < len(ids):
        back = [topic for topic in recent[:-1] if at[topic] < ends[topic]]
        any_left = np.flatnonzero(at < ends)
        return_, pick, length = (int(word) for word in choices[drawn : drawn + 3])
        drawn += 3
        topic = back[pick % len(back)] if back and return_ & 1 else int(any_left[pick % len(any_left)])
        recent = [*(t for t in recent if t != topic), topic][-5:]
        count = min(int(ends[topic] - at[topic]), SHORTEST + length % (LONGEST - SHORTEST + 1))
        order[done : done + count] = by_topic[at[topic] : at[topic] + count]
        at[topic] += count
        done += count
    successor = np.full(vocabulary, order[0])
    successor[order] = np.roll(order, -1)
    return Walk(order, topic_of, successor)
