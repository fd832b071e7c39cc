"""A real small model in this process, talked to in turns at the runner: every logit can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from lanes import limits
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.golden import PackRecords
from lanes.models import load_model
from lanes.runner import ModelRunner
from lanes.state.conversations import Begun, Conversations
from lanes.state.pool import StatePool
from lanes.state.reuse import marks, parts
from lanes.window import Window
from shared_experts.pack import Pack

CHUNK = 64


class Talk:
    """One lane's worth of conversations."""

    def __init__(self, model, store, *, kept_bytes: int, context: int = 1024, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self.windows: list[tuple[int, list[int]]] = []  # (start, ids) of the last turn
        self.counters = Counters()
        self.states = StatePool(model.state_shape, model.state_shape.bytes(context) + kept_bytes, paged=True)
        self.held = Conversations(self.states, self.counters)
        self.runner = ModelRunner(model, self.states, store, self.held)

    def turn(
        self, prompt: Sequence[int], answer_tokens: int, *, forced: Sequence[int] | None = None, tenant: bytes = b"",
        hints: Sequence[int] = (), drafts: Callable[[list[int]], list[int]] | None = None,
    ) -> tuple[list[int], np.ndarray, Begun]:  # fmt: skip
        """The answer (greedy, or forced), logits [answer tokens, V] before each of its tokens, where it began.

        `drafts` says of the forced tokens that come next which ids to try in one window with the last one.
        """
        self.windows = []
        begun = self.runner.resume(prompt, len(prompt) + answer_tokens, tenant)
        where = marks(len(prompt), hints, limits.CHECKPOINT_EVERY_TOKENS, limits.CHECKPOINT_GAP_TOKENS)
        rows, ids = [], []
        for part in parts(begun.cached_tokens, len(prompt), self._chunk, where):
            logits = self._step(list(prompt[part.start : part.end]), part.start, begun.slot)
            if part.mark:
                self.runner.checkpoint(begun.slot)
        if drafts is not None:
            assert forced is not None
            rows = self._drafted(begun.slot, len(prompt), list(forced), logits, drafts)
            self.runner.end(begun.slot)
            return list(forced), np.stack(rows), begun
        for at in range(answer_tokens):
            rows.append(logits[0].copy())
            ids.append(int(forced[at] if forced else rows[-1].argmax()))
            if at < answer_tokens - 1:  # the last token is never read back
                logits = self._step([ids[-1]], len(prompt) + at, begun.slot)
        self.runner.end(begun.slot)
        return ids, np.stack(rows), begun

    def _drafted(
        self, slot: int, start: int, forced: list[int], logits: np.ndarray, drafts: Callable[[list[int]], list[int]]
    ) -> list[np.ndarray]:
        """Logits of every forced token, read in windows with drafts, the right ones of which are taken over."""
        rows, at = [logits[0].copy()], 0
        while at < len(forced) - 1:
            tried = drafts(forced[at + 1 : -1])
            if self.states[slot].draft is not None:
                for number in range(len(tried)):  # its rows lie past the end, and must not be seen again
                    self.runner.guess(slot, forced[at], number)
            ids = [forced[at], *tried]
            window = Window.of_sequence(ids, start + at, slot, logits="all", trial=True)
            logits = self.runner.forward(window, lambda: False)
            assert logits is not None
            right = 0
            while right < len(tried) and tried[right] == forced[at + 1 + right]:
                right += 1
            self.runner.commit(slot, 1 + right)
            self.runner.end_window()
            rows += [row.copy() for row in logits[: 1 + right]]
            at += 1 + right
        return rows

    def replay(self, windows: Sequence[tuple[int, list[int]]], rows: int) -> np.ndarray:
        """The same windows from an empty state: logits [rows, V] of the last ones."""
        slot = self.runner.begin(1 + max(start + len(ids) for start, ids in windows))
        logits = [self._step(ids, start, slot)[0].copy() for start, ids in windows]
        self.runner.end(slot)
        return np.stack(logits[-rows:])

    def _step(self, ids: list[int], start: int, slot: int) -> np.ndarray:
        self.windows.append((start, ids))
        logits = self.runner.forward(Window.of_sequence(ids, start, slot), lambda: False)
        self.runner.end_window()
        assert logits is not None
        return logits


@contextmanager
def loaded(folder, *, drafts: bool = False) -> Iterator[tuple[object, ExpertStore]]:
    """A pack's model, with its draft layer or without, and its experts, read where they lie in the file."""
    torch.set_num_threads(1)
    with Pack.open(folder) as pack:
        info, counters = pack.manifest.experts, Counters()
        kernel = ExpertKernel(info.layout, threads=1)
        try:
            store = ExpertStore(
                kernel, ExpertCache(PackRecords(pack.experts_path, info), info, 0, adaptive, counters), counters
            )
            yield load_model(pack, store, drafts=drafts), store
        finally:
            kernel.close()
