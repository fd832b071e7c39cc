"""What a request does to the model's logits before a token is drawn: bias, then penalties, then the minimum length.

Each step rounds to fp32 and changes a few ids only; counts are kept up, never counted again.
Not here: temperature and what is cut off (sampler); why this order (docs/sampling.md).

Invariants: the row that is drawn from is a function of (raw logits, request, output so far) only, so a replay draws
what the lost lane would have drawn; only the minimum length gives -inf, and never to all ids; the raw row is not
touched.

Letters: V vocabulary, N ids that are changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lanes.request import Request

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_GREATEST = float(np.finfo(np.float32).max)


class TokenCounts:
    """How often each token has come: its ids without gaps, in order of their first place here, with their counts."""

    def __init__(self, vocab_size: int, tokens: Sequence[int]) -> None:
        self._place = np.full(vocab_size, -1, np.int32)  # by id: where it is in the other two
        self._ids = np.empty(vocab_size, np.int64)  # memory that is not written is not used
        self._counts = np.empty(vocab_size, np.float64)
        counts = np.bincount(np.asarray(tokens, np.int64), minlength=vocab_size)
        ids = np.flatnonzero(counts)
        self._size = ids.shape[0]
        self._place[ids] = np.arange(self._size)
        self._ids[: self._size] = ids
        self._counts[: self._size] = counts[ids]

    def add(self, token: int) -> None:
        """Once more."""
        place = self._place[token]
        if place < 0:
            place = self._place[token] = self._size
            self._ids[place] = token
            self._counts[place] = 0
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        """The tokens that have come: [N]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Doubles:
        """How often each of `ids`: [N]."""
        return self._counts[: self._size]


class Penalties:
    """One per generation: `row` before every draw, `add` after it."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        sampling = request.sampling
        output = request.prompt_ids[len(request.prompt_ids) - request.replayed_tokens :]
        self._row = np.empty(vocab_size, np.float32)  # kept: a fresh megabyte would be mapped for every token
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float64)
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._seen = TokenCounts(vocab_size, request.prompt_ids) if self._repetition != 1.0 else None
        self._output = TokenCounts(vocab_size, output) if self._presence or self._frequency else None
        self._unripe = max(0, sampling.min_tokens - len(output))  # tokens still to come before a stop id may
        self._stop_ids = np.array(sorted(request.stop_ids), np.int64)

    @property
    def none(self) -> bool:
        """No row is changed, now or later."""
        masked = self._unripe > 0 and self._stop_ids.size > 0
        return not (masked or self._bias_ids.size or self._seen or self._output)

    def row(self, logits: Floats) -> Floats:
        """The logits to draw from, until the next call; the same array when nothing changes. logits: [V], finite."""
        if self.none:
            return logits
        row = self._row
        np.copyto(row, logits)
        if self._bias_ids.size:
            row[self._bias_ids] = _rounded(row[self._bias_ids] + self._bias)
        if self._seen is not None:
            values = row[self._seen.ids].astype(np.float64)
            factor = self._repetition
            row[self._seen.ids] = _rounded(np.where(values > 0.0, values / factor, values * factor))
        if self._output is not None:
            penalty = self._frequency * self._output.counts + self._presence
            row[self._output.ids] = _rounded(row[self._output.ids] - penalty)
        if self._unripe > 0:
            row[self._stop_ids] = -np.inf
        return row

    def add(self, token: int) -> None:
        """The token has become output."""
        if self._seen is not None:
            self._seen.add(token)
        if self._output is not None:
            self._output.add(token)
        if self._unripe:
            self._unripe -= 1


def _rounded(values: Doubles) -> Floats:
    """To fp32; what is out of its range becomes its end, so a finite logit stays finite."""
    return np.clip(values, -_GREATEST, _GREATEST).astype(np.float32)
