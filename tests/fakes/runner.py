"""A tiny deterministic model for the engine: the next token follows from position and last token.

Its draft layer is an oracle: it knows the next token, and lies at the places of `lies`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lanes.sampler import greedy
from lanes.state.conversations import Begun
from lanes.window import Meanwhile, Window, nothing

VOCAB = 50


def next_token(token: int, position: int) -> int:
    """What the fake model says after `token` at `position`."""
    return (token * 7 + position * 3 + 1) % VOCAB


class FakeRunner:
    """Counts windows and slots. `gate`, when set to an Event, holds every window until it is set."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []  # (first position, rows)
        self.hints: list[tuple[int, int]] = []  # (first position, end)
        self.hinted_before: list[int] = []  # windows that had run when each hint came
        self.turns = 0
        self.idle_fails = False
        self.interrupted_early = False  # a cancel is seen before the device has anything
        self.known = 0  # tokens of every prompt that need not be read
        self.marks: list[int] = []  # where checkpoints were made
        self.open: set[int] = set()
        self.lengths: dict[int, int] = {}  # tokens in the state, by slot
        self.steered: list[bool] = []  # of each window
        self.rooms: dict[int, int] = {}  # by slot
        self.owners: list[int] = []  # slot of each window
        self.opened = 0
        self.gate: threading.Event | None = None
        self.gate_from = 0  # first position that the gate holds
        self.entered = threading.Semaphore(0)
        self.poison_at: int | None = None  # position whose logits are NaN
        self.raise_at: int | None = None
        self.delay_s = 0.0
        self.trial = 0  # rows on trial
        self.lies: Callable[[int], bool] = lambda position: False  # of a drafted token
        self.guessed: list[int] = []  # positions of guesses
        self.kept: list[tuple[int, int]] = []  # (rows on trial, rows kept)

    def begin(self, max_tokens: int) -> int:
        slot = self.opened
        self.opened += 1
        self.open.add(slot)
        self.capacity = max_tokens
        self.lengths[slot] = self.next = 0
        self.rooms[slot] = max_tokens
        return slot

    def resume(self, prompt_ids: Sequence[int], max_tokens: int, tenant: bytes) -> Begun:
        slot = self.begin(max_tokens)
        self.lengths[slot] = self.next = min(self.known, len(prompt_ids) - 1)
        return Begun(slot, self.next, min(self.next, 1))

    def checkpoint(self, slot: int) -> None:
        assert slot in self.open
        self.marks.append(self.next)

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        assert 0 <= start < end <= len(ids)
        self.hints.append((start, end))
        self.hinted_before.append(len(self.windows))

    def forward(self, window: Window, stopped: Callable[[], bool], meanwhile: Meanwhile = nothing) -> np.ndarray | None:
        slot = int(window.seq[0])
        assert set(window.seq.tolist()) == {slot}
        assert slot in self.open
        first, rows = int(window.positions[0]), window.token_ids.shape[0]
        assert first == self.lengths[slot], "positions must continue the sequence"
        assert first + rows <= self.rooms[slot]
        assert self.trial == 0, "another window before the commit"
        if window.trial:
            self.trial = rows
        else:
            self._move(slot, first + rows)
        if not self.interrupted_early:
            meanwhile()
        self.entered.release()
        time.sleep(self.delay_s)
        if self.gate is not None and first >= self.gate_from:
            assert self.gate.wait(20)
        if stopped():
            return None
        self.windows.append((first, rows))
        self.owners.append(slot)
        self.steered.append(window.steered)
        logits = np.zeros((int(window.want_logits.sum()), VOCAB), np.float32)
        wanted = [r for r in range(rows) if window.want_logits[r]]
        for at, row in enumerate(wanted):
            position = int(window.positions[row])
            if position == self.raise_at:
                raise ZeroDivisionError("secret prompt text")
            logits[at, next_token(int(window.token_ids[row]), position)] = 5.0
            if position == self.poison_at:
                logits[at, 3] = np.nan
        return greedy(logits) if window.best else logits

    def commit(self, slot: int, rows: int) -> None:
        assert slot in self.open
        assert 1 <= rows <= self.trial
        self.kept.append((self.trial, rows))
        self._move(slot, self.lengths[slot] + rows)

    def _move(self, slot: int, length: int) -> None:
        self.lengths[slot] = self.next = length
        self.trial = 0

    def guess(
        self, slot: int, token: int, number: int, best: bool = False, meanwhile: Meanwhile = nothing
    ) -> np.ndarray | None:
        assert slot in self.open
        meanwhile()
        position = self.lengths[slot] + number  # of `token`; the guess is for the place after it
        self.guessed.append(position + 1)
        row = np.zeros(VOCAB, np.float32)
        lie = self.lies(position + 1)
        row[(next_token(token, position) + lie) % VOCAB] = 9.0
        return row

    def end_window(self) -> None:
        self.turns += 1

    def settle(self) -> None:
        pass

    def idle(self) -> bool:
        if self.idle_fails:
            raise ZeroDivisionError("secret prompt text")
        return False

    def end(self, slot: int) -> None:
        self.trial = 0
        self.open.remove(slot)
