"""The draft layer's guesses on a GPU, each against the eager draft layer on the CPU that is given the same streams.

A guess reads streams of the windows before it, and the next one those of this one. A draft layer of random weights
moves by many times what its input has moved: sums in another order turn roundings, and a whole lane's guesses are far
apart where nothing is wrong (docs/exactness.md has figures), so that a wrong row could hide among them. Here the twin
is told what the windows gave, and goes on from the streams of the guess before: what is left is one layer's rounding.
Whether the windows' streams are right has a row of its own.

Not here: other rows (exactness_margins), the tolerance (lanes.tolerance).

Letters: V vocabulary, S streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.exactness_cases import Case, Ground
from bench.gpu_lane_rig import Lane, types_of
from bench.near_tie import apart, tolerance
from lanes.models.qwen4_exp.gpu.guessing import Guessing
from lanes.models.qwen4_exp.gpu.model import GpuQwen4Exp
from lanes.models.qwen4_exp.gpu.saying import Ids
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.runner import Likeliest
from lanes.state.sequence import SequenceState

# Guesses at once, then a window of them and the token in front: how many of its rows are right; 0: single windows.
ROUNDS = ((3, 1), (2, 3), (3, 0), (1, 2), (3, 4), (2, 1))


class Heard:
    """What the windows of a lane, and of the one that reads its prompts, tell their draft layer."""

    def __init__(self, lane: Lane) -> None:
        self.streams: list[torch.Tensor] = []  # fp32 [R, S * H] in host memory
        self._heard = False  # already, of a window
        for model in (each.model for each in (lane, lane.prompter) if each is not None):
            assert isinstance(model, GpuQwen4Exp | Qwen4Exp)
            assert model.drafts is not None
            self._listen(model.drafts)
            if isinstance(model, GpuQwen4Exp) and model._guessing is not None:
                self._listen_to_windows(model._guessing)

    def _listen(self, layer: DraftLayer) -> None:
        follow = layer.follow

        def heard(state: SequenceState, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
            if not self._heard:
                self.hear(streams.to("cpu", copy=True), token_ids.clone())
            follow(state, streams, token_ids)

        layer.follow = heard  # type: ignore[method-assign]

    def _listen_to_windows(self, guessing: Guessing) -> None:
        """Whose rows seldom go through the layer's own."""
        follow = guessing.follow

        def heard(state: SequenceState, ids: Ids) -> None:
            self.hear(guessing.streams[: len(ids)].to("cpu", copy=True), torch.from_numpy(ids.copy()))
            self._heard = True
            follow(state, ids)
            self._heard = False

        guessing.follow = heard  # type: ignore[method-assign]

    def hear(self, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Rows that belong to the sequence from now on."""
        self.streams.append(streams)


class Twin(Heard):
    """The eager draft layer on the CPU, in the types of a lane on a GPU, with a sequence that has no other layers."""

    def __init__(self, ground: Ground, lane: Lane) -> None:
        super().__init__(lane)
        self._own = ground.cpu(drafts=True, dtype=types_of(ground.pack, ground.device))
        assert isinstance(self._own.model, Qwen4Exp)
        assert self._own.model.drafts is not None
        assert isinstance(lane.model, GpuQwen4Exp)
        self._layer, self._lane, self._model = self._own.model.drafts, lane, lane.model
        self._said: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._chained: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, ids: Sequence[int]) -> int:
        """The slot, in the lane, of a sequence that has read these ids; the twin goes along."""
        self._state = self._own.states[self._own.states.open(self._own.context_tokens)]
        return self._lane.begin(ids)

    @torch.no_grad()
    def hear(self, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
        """It follows."""
        super().hear(streams, token_ids)
        self._state.reserve(self._state.length + len(token_ids))
        self._layer.follow(self._state, streams, token_ids)
        self._state.length += len(token_ids)

    @torch.no_grad()
    def guess(self, slot: int, token: int, number: int) -> torch.Tensor:
        """The lane's, [V], beside the twin's."""
        if number:
            self._layer.chained = self._model.chained.to("cpu", copy=True)
        logits = self._model.guess(self._lane.states[slot], token, number)
        assert isinstance(logits, torch.Tensor)
        found = logits.cpu().clone()
        self._said.append((found, self._layer.guess(self._state, token, number)))
        self._chained.append((self._model.chained[0].cpu().clone(), self._layer.chained[0].clone()))
        return found

    def apart(self, ground: Ground) -> str:
        """How far all guesses were apart, and what the next ones go on from; raises Apart."""
        found = []
        for pairs in (self._said, self._chained):
            got, want = (torch.stack(each) for each in zip(*pairs, strict=True))
            found.append(apart(got, want, tolerance(ground.pack)))
        return f"{found[0]}; their streams {found[1]}"


def guesses(ground: Ground) -> str:
    """Three after one another, after windows and trial windows."""
    lane = ground.lane(drafts=True)
    twin = Twin(ground, lane)
    slot = twin.begin(ground.ids[: ground.prompt])
    for at in range(ground.prompt, len(ground.ids) - 2, 2):
        for number in range(3):
            twin.guess(slot, ground.ids[at + number], number)
        lane.experts.end_window()
        lane.trial([ground.ids[at], ground.ids[at + 1], 5], slot, 2)
    return twin.apart(ground)


def late_guesses(ground: Ground) -> str:
    """After windows that nobody guessed beside, after a guess about what then did not come, and after a prompt so short
    that all of its rows wait."""
    lane, next_ids = ground.lane(drafts=True), ground.rest[4:]
    twin = Twin(ground, lane)
    slot = twin.begin(ground.ids[: ground.prompt])
    lane.windows(ground.rest[:4], slot, [1, 3])  # two rows are remembered, then three wait
    twin.guess(slot, next_ids[0], 0)
    twin.guess(slot, 9, 0)
    lane.experts.end_window()
    lane.trial(next_ids[:2], slot, 2)
    twin.guess(slot, next_ids[2], 0)
    short = twin.begin(ground.ids[:10])
    said = twin.guess(short, ground.ids[10], 0)
    found = lane.model.guess(lane.states[short], ground.ids[10], 0, best=1)
    assert isinstance(found, list)
    ((place, share),), want = found, Likeliest.of(said.numpy())
    assert place == want.place
    assert abs(share - want.share) < 1e-5, (share, want)
    return twin.apart(ground)


def streams(ground: Ground) -> str:
    """What guesses begin from, of windows and trial windows: as the lane on the CPU has it, beyond what rounding as a
    GPU does moves it there."""
    dtype, found = types_of(ground.pack, ground.device), []
    types = [None] if dtype in (None, torch.float32) else [None, dtype]
    for lane in (ground.lane(drafts=True), *(ground.cpu(drafts=True, dtype=each) for each in types)):
        slot, heard = lane.begin(ground.ids[: ground.prompt]), Heard(lane)
        for at in range(ground.prompt, len(ground.ids) - 2, 3):
            lane.windows(ground.ids[at : at + 1], slot, [1])
            lane.trial([ground.ids[at + 1], ground.ids[at + 2], 5], slot, 2)
        found.append(torch.cat(heard.streams))
    got, want, *rounded = found
    return apart(got, want, tolerance(ground.pack), *rounded)


def at_once(ground: Ground) -> str:
    """By one call, which the device goes on with by itself, against one by one on another lane: what they name and all
    that they leave, to the bit, also once a window has come after them, of whichever length and outcome."""
    lanes = [ground.lane(drafts=True) for _ in range(2)]
    assert all(lane.model.chains for lane in lanes), "kernels read the embedding"
    slots = [lane.begin(ground.ids[: ground.prompt]) for lane in lanes]
    states, made = [lane.states[slot] for lane, slot in zip(lanes, slots, strict=True)], 0
    for token, (count, right) in zip(ground.rest, ROUNDS, strict=False):
        found = lanes[0].model.guess(states[0], token, 0, best=count)
        assert isinstance(found, list)
        _like(found, lanes[1], states[1], token)
        _alike(states, count)
        for lane, slot in zip(lanes, slots, strict=True):
            lane.experts.end_window()
            if right:
                lane.trial([token, *(place for place, _ in found)], slot, right)
            else:  # a silence
                lane.windows([token, *(place for place, _ in found)], slot, [1])
        _alike(states, 0)
        made += count
    return f"{made} guesses"


def _like(found: Sequence[tuple[int, float]], lane: Lane, state: SequenceState, token: int) -> None:
    for number, each in enumerate(found):
        assert each[0] >= 0, "a guess that names something"
        assert 0 < each[1] <= 1
        assert lane.model.guess(state, token, number, best=1) == [each], (number, each)
        token = each[0]


def _alike(states: Sequence[SequenceState], guesses: int) -> None:
    """Two states have the same for the draft layer, and what so many guesses have written past the end."""
    mine, its = states
    assert mine.draft is not None
    assert its.draft is not None
    waiting, layer = mine.draft.waiting, max(mine.attention)
    assert (mine.length, waiting) == (its.length, its.draft.waiting)
    assert torch.equal(mine.draft.streams[:waiting], its.draft.streams[:waiting])
    assert torch.equal(mine.draft.ids[:waiting], its.draft.ids[:waiting])
    rows = mine.length - waiting + guesses
    for ours, theirs in zip(*(each.attention[layer].of(0, rows) for each in states), strict=True):
        assert torch.equal(ours, theirs), "keys and values of the draft layer"


GUESSES: dict[str, Case] = {
    "streams that guesses read": streams,
    "guesses in the GPU's types": guesses,
    "guesses after a silence": late_guesses,
    "guesses at once": at_once,
}
