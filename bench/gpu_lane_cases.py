"""What must hold of a lane on a GPU, case by case on a small random pack: shared by a check of minutes and by tests.

Each case returns a line of figures and raises AssertionError where something does not hold. What is equal within a
tolerance is so within the pack's (lanes.tolerance).
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence

import torch

from bench.gpu_lane_rig import CONTEXT, Lane, cpu_lane, gpu_lane, types_of
from bench.near_tie import apart, tolerance
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.prompt import Means
from lanes.experts.store import Interrupted
from lanes.runner import Likeliest
from lanes.sampler import greedy
from lanes.state.checkpoint import Checkpoint
from lanes.state.pool import Branch
from lanes.window import Window
from shared_experts.pack import Pack

SIZES = (1, 2, 3, 4, 4, 1, 3, 1, 2)  # rows of windows
PROMPT = 50  # tokens: more blocks than are read


def prompt(pack: Pack, tokens: int, seed: int = 1) -> list[int]:
    """Random ids."""
    vocab = int(str(pack.manifest.config["vocab_size"]))
    return random.Random(seed).choices(range(2, vocab), k=tokens)  # noqa: S311 - not a secret


def bit_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares logits."""
    assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} logits differ"


def spoken(lane: Lane, ids: Sequence[int], sizes: Sequence[int] = SIZES) -> torch.Tensor:
    """Logits of a prompt in one chunk and of what follows in small windows."""
    slot = lane.begin(ids[:PROMPT])
    try:
        return lane.windows(ids[PROMPT:], slot, sizes)
    finally:
        lane.model.settle(lane.states[slot])
        lane.states.close(slot)


def tried(lane: Lane, ids: Sequence[int]) -> torch.Tensor:
    """The same with trial windows: wrong drafts behind right ones, dropped windows, then the rest one by one."""
    slot, out, at = lane.begin(ids[:PROMPT]), [], PROMPT
    wrong = [(token + 7) % 200 + 2 for token in ids]
    for rows, right in ((4, 2), (3, 1), (4, 4), (2, 0), (4, 3), (1, 1), (4, 0)):
        if at + rows > len(ids):
            break
        logits = lane.trial([*ids[at : at + max(1, right)], *wrong[at + max(1, right) : at + rows]], slot, right)
        out.append(logits[:right])
        at += right
    out.append(lane.windows(ids[at:], slot, [1]))
    lane.model.settle(lane.states[slot])
    lane.states.close(slot)
    return torch.cat(out)


def against_the_cpu(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """A lane on the CPU, in the GPU's types, and this one, every window size."""
    want = spoken(cpu_lane(pack, dtype=types_of(pack, device)), ids)
    return apart(spoken(gpu_lane(pack, device), ids), want, tolerance(pack))


def captured_as_launched(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """Graphs give the bits of the same launches made one by one; and the same again."""
    launched, captured = gpu_lane(pack, device, capture=False), gpu_lane(pack, device, capture=True)
    want = spoken(launched, ids)
    for _ in range(2):
        bit_equal(spoken(captured, ids), want)
    bit_equal(tried(captured, ids), tried(launched, ids))
    return f"{len(ids) - PROMPT} tokens, and trial windows"


def whatever_is_cached(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """No expert cached, a tenth, half, all: the same bits."""
    info = pack.manifest.experts
    every = info.layers * info.experts
    want, hits = None, []
    for slots in (0, max(1, every // 10), every // 2, every):
        lane = gpu_lane(pack, device, slots=slots)
        for _ in range(3):  # what the first has cached the next ones hit
            got = spoken(lane, ids)
            bit_equal(got, want if want is not None else got)
            want = got
        lane.experts.settle()
        asked = lane.counters.expert_hits + lane.counters.expert_misses
        hits.append(f"{slots} slots {100 * lane.counters.expert_hits / asked:.0f} %")
    return "hits: " + ", ".join(hits)


def whatever_feeds_a_prompt(
    pack: Pack, device: str, ids: Sequence[int], rings: Sequence[int] = (1, 2, 3), rows: int = PROMPT
) -> str:
    """Its experts read in place, copied as they were chosen or ahead, through rings of 1 to 3 slots, and again after a
    cancel between any two layers: the same bits."""
    info, copied = pack.manifest.experts, []
    want = _read(gpu_lane(pack, device), ids, rows)
    for ahead, slots in itertools.product((False, True), rings):
        lane = gpu_lane(pack, device, slots=8 * slots)
        lane.prompter = None
        assert isinstance(lane.experts, GpuExperts)
        means = Means(ahead=ahead, slots=slots)
        lane.experts.feeding = lambda _, means=means: means  # type: ignore[misc]
        for layers in range(info.layers - info.draft_layers if ahead else 1):
            if layers:
                _cancelled(lane, ids[:rows], layers)
            bit_equal(_read(lane, ids, rows), want)
        copied.append(lane.counters.streamed_bytes // info.record_bytes)
    return f"records copied: {copied}"


def _read(lane: Lane, ids: Sequence[int], rows: int) -> torch.Tensor:
    """Logits of the last prompt row and of one more token."""
    lane.prompter = None
    slot = lane.states.open(CONTEXT)
    first = lane.windows(ids[:rows], slot, [rows], logits="last")
    second = lane.windows(ids[rows : rows + 1], slot, [1])
    lane.model.settle(lane.states[slot])
    lane.states.close(slot)
    return torch.cat((first, second))


def _cancelled(lane: Lane, ids: Sequence[int], layers: int) -> None:
    """A prompt that is left before that layer, as the runner leaves one."""
    left = iter([False] * layers)
    lane.experts.stopped = lambda: next(left, True)
    slot = lane.states.open(CONTEXT)
    with contextlib.suppress(Interrupted):
        lane.windows(ids, slot, [len(ids)], logits="last")
        raise AssertionError("nobody stopped")
    lane.experts.stopped = lambda: False
    lane.experts.end_window()
    lane.states.close(slot)


def whoever_computes_misses(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """All misses by the link, all by the CPU, half each, and as the search goes: the same bits."""
    lane = gpu_lane(pack, device, shared=True)
    assert lane.share is not None
    want, half = spoken(gpu_lane(pack, device), ids), lane.share.most // 2
    try:
        bit_equal(spoken(lane, ids), want)  # by measured rates, and searching
        for counts in (half * 0, half, lane.share.most):
            lane.share.split(counts.astype(half.dtype))
            bit_equal(spoken(lane, ids), want)
            bit_equal(spoken(lane, ids), want)
    finally:
        lane.close()
    return f"doorbell: {type(lane.share.doorbell).__name__}"


def drafts_change_nothing(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """Trial windows with rejected and dropped rows against plain ones."""
    lane = gpu_lane(pack, device)
    return apart(tried(lane, ids), spoken(lane, ids, [1]), tolerance(pack))


def greatest_alone(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """Windows that are asked for their best ids against the same windows' logits."""
    lane = gpu_lane(pack, device)
    slot = lane.begin(ids[:PROMPT])
    state = lane.states[slot]

    def ran(rows: int, *, best: bool) -> torch.Tensor:
        rows_of = list(ids[PROMPT : PROMPT + rows])
        window = Window.of_sequence(rows_of, state.length, slot, logits="all", trial=True, best=best)
        out = lane.model.forward(window, lane.states).clone()  # a trial that is never committed has not happened
        lane.experts.end_window()
        return out

    for rows in (1, 4):
        want = greedy(ran(rows, best=False).numpy())
        assert ran(rows, best=True).tolist() == want.tolist()
        assert (want >= 0).all()
    return "1 and 4 rows"


def taking_turns(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """A sequence gives the same bits when another one runs between its windows: the seat moves states unchanged."""
    lane = gpu_lane(pack, device)
    others = prompt(pack, len(ids), seed=2)
    want = spoken(lane, ids, [1])
    first, second = (lane.begin(each[:PROMPT]) for each in (ids, others))
    got = []
    for at in range(PROMPT, len(ids)):
        got.append(lane.windows(ids[at : at + 1], first, [1]))
        if at + 1 < len(ids):
            lane.windows(others[at : at + 1], second, [1])
    bit_equal(torch.cat(got), want)
    return f"{2 * len(got) - 1} turns"


def branching(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """A branch at a checkpoint gives its root's bits, whether the root is in the seat or in host memory."""
    lane = gpu_lane(pack, device)
    root = lane.begin(ids[:PROMPT])
    state = lane.states[root]
    lane.model.settle(state)
    kept = Checkpoint.of(state)
    want = lane.windows(ids[PROMPT:], root, [1])
    lane.model.settle(state)
    for _ in range(2):
        slot = lane.states.open(CONTEXT, Branch(state, PROMPT, PROMPT))
        kept.into(lane.states[slot])
        bit_equal(lane.windows(ids[PROMPT:], slot, [1]), want)
        lane.model.settle(lane.states[slot])
        lane.states.close(slot)
    return f"{2 * len(want)} tokens of branches"


def guesses(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """The draft layer after windows and trial windows, as in the GPU's types on the CPU."""
    answers, dtype = [], types_of(pack, device)
    for lane in (cpu_lane(pack, drafts=True, dtype=dtype), gpu_lane(pack, device, drafts=True)):
        slot, rows = lane.begin(ids[:PROMPT]), []
        for at in range(PROMPT, len(ids) - 2, 2):
            rows += [lane.model.guess(lane.states[slot], ids[at + n], n).cpu().clone() for n in range(3)]
            lane.experts.end_window()
            lane.trial([ids[at], ids[at + 1], 5], slot, 2)
        answers.append(torch.stack(rows))
    return apart(answers[1], answers[0], tolerance(pack))


def late_guesses(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """The draft layer after windows that nobody guessed beside, and after a guess about what then did not come."""
    answers, dtype, end = [], types_of(pack, device), PROMPT + 4
    for lane in (cpu_lane(pack, drafts=True, dtype=dtype), gpu_lane(pack, device, drafts=True)):
        slot = lane.begin(ids[:PROMPT])
        lane.windows(ids[PROMPT:end], slot, [4])  # five rows wait now
        state = lane.states[slot]
        rows = [lane.model.guess(state, ids[end], 0).cpu().clone(), lane.model.guess(state, 9, 0).cpu().clone()]
        lane.experts.end_window()
        lane.trial([ids[end], ids[end + 1]], slot, 2)
        rows.append(lane.model.guess(state, ids[end + 2], 0).cpu().clone())
        answers.append(torch.stack(rows))
    place, share = lane.model.guess(state, ids[end + 2], 0, best=True).tolist()  # of the lane on a GPU
    want = Likeliest.of(rows[-1].numpy())
    assert place == want.place
    assert abs(share - want.share) < 1e-5, (share, want)
    return apart(answers[1], answers[0], tolerance(pack))
