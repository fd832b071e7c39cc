"""Windows of a stream of tokens, shuffled anew every epoch; which window comes when depends on its number alone."""

from __future__ import annotations

import numpy as np
import torch


class Windows:
    """Batches of windows of `tokens` ids from a stream on a device."""

    def __init__(self, stream: np.ndarray, device: torch.device | str, seed: int = 0) -> None:
        self._stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        self._seed = seed
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self._stream.shape[0]

    def batch(self, number: int, sequences: int, tokens: int) -> torch.Tensor:
        """int64 [sequences, tokens]: windows number .. number + sequences - 1. ValueError for too short a stream."""
        starts = torch.tensor([self._start(number + i, tokens) for i in range(sequences)], device=self._stream.device)
        return self._stream[starts[:, None] + torch.arange(tokens, device=starts.device)].long()

    def _start(self, number: int, tokens: int) -> int:
        count = (self.tokens - tokens) // tokens  # room for an offset that differs from epoch to epoch
        if count < 1:
            raise ValueError(f"a stream of {self.tokens} tokens has no two windows of {tokens}")
        epoch, place = divmod(number, count)
        if self._order is None or self._order[0] != (epoch, tokens):
            random = np.random.default_rng([self._seed, epoch, tokens])
            offset = random.integers(tokens)
            self._order = ((epoch, tokens), random.permutation(count) * tokens + offset)
        return int(self._order[1][place])
