"""The self-test of a lane: a fixed question through the whole model before anybody may ask one.

    expert rows      a kernel call on a few records where they lie    bit-equal to the golden record, on every processor
                     (no record: bit-equal to the plain numpy twin)
    whole model      16 prompt rows, then decode steps                within the tolerance, or twice the spread that the
                                                                      golden record gives; same best token wherever its
                                                                      lead exceeds that
    once more        the same, with what the first run has cached     bit-equal to the first run

Not here: where the record comes from (`shared_experts.golden`) or how it is made (`golden`).
Invariant: returns only when everything that was compared agreed; else SelfTestFailed says what did not.

Letters: V vocabulary, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanes.errors import SelfTestFailed
from lanes.experts import reference
from lanes.experts.store import Kernel
from lanes.runner import Logits, Runner
from lanes.tolerance import FP32
from lanes.window import Window
from shared_experts.golden import GoldenRecord, StepLogits
from shared_experts.manifest import ExpertsInfo

PROMPT_TOKENS = 16
DECODE_STEPS = 4
TOP = 8
MOST_EXPERTS = 64

Row = npt.NDArray[np.float32]
Address = Callable[[int, int], int]  # (layer, expert) to where its record lies


@dataclass(frozen=True, slots=True)
class Experts:
    """What the test needs of the expert layer."""

    kernel: Kernel
    info: ExpertsInfo
    address: Address
    record: Callable[[int, int], bytes | memoryview]


def run(runner: Runner, experts: Experts, vocab: int, golden: GoldenRecord | None, tolerance: float = FP32) -> str:
    """Tests and returns what was compared, for the log; raises SelfTestFailed."""
    prompt: Sequence[int] = question(vocab, 0)
    steps: Sequence[StepLogits] = ()
    if golden is None:
        check_twin(experts)
    else:
        check_experts(experts, golden)
        prompt, steps = golden.prompt, golden.steps
        tolerance = max(tolerance, 2 * golden.spread)
        if max(prompt) >= vocab or any(token >= vocab for step in steps for token, _ in step.top):
            raise SelfTestFailed("the golden record has a token that is not in the vocabulary")
    forced = [step.top[0][0] for step in steps[:-1]] or None
    first = answer(runner, prompt, forced)
    for number, (step, logits) in enumerate(zip(steps, first, strict=bool(steps))):
        check_step(number, step, logits, tolerance)
    again = answer(runner, prompt, forced)
    if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
        raise SelfTestFailed("the same question got other logits the second time")
    if golden is None:
        return "no golden record: finite, repeatable, one expert of the first and last layer as its plain twin says"
    return f"{len(golden.experts)} expert rows and {len(steps)} steps as recorded, repeatable"


def question(vocab: int, number: int) -> tuple[int, ...]:
    """Prompt `number` of a vocabulary: an id from each end, then ids spread over it."""
    spread = ((i * 2_654_435_761 + number * 40_503) % vocab for i in range(1, PROMPT_TOKENS - 1))
    return (vocab - 1 - number, number, *spread)


def chosen_experts(info: ExpertsInfo) -> list[tuple[int, int]]:
    """One expert of every layer, or of MOST_EXPERTS layers evenly spread, always the first and the last layer."""
    count = min(info.layers, MOST_EXPERTS)
    layers = [i * (info.layers - 1) // max(1, count - 1) for i in range(count)]
    return [(layer, (layer * 37 + 3) % info.experts) for layer in layers]


def expert_row(experts: Experts, layer: int, expert: int) -> Row:
    """What an expert makes of the fixed input [H] of its number: fp32 [H]."""
    x = fixed_input(layer, expert, experts.info.hidden)
    out = np.empty_like(x)
    addresses = np.array([experts.address(layer, expert)], np.uint64)
    experts.kernel.run(addresses, np.array([0, 1], np.int32), np.zeros(1, np.int32), x, out)
    row: Row = out[0]
    return row


def fixed_input(layer: int, expert: int, hidden: int) -> npt.NDArray[np.float32]:
    """Numbers in [-8, 8) that fp32 holds exactly: [1, H]."""
    i = np.arange(hidden, dtype=np.uint64) + np.uint64(1 + 97 * layer + 8191 * expert)
    mixed = (i * np.uint64(2_654_435_761)) >> np.uint64(13) & np.uint64(0xFFFF)
    return ((mixed.astype(np.int64) - 0x8000) / 4096).astype(np.float32)[None]


def digest(row: Row) -> str:
    """SHA-256 of a row's bits, in hexadecimal."""
    return hashlib.sha256(row.astype("<f4", copy=False).tobytes()).hexdigest()


def check_experts(experts: Experts, golden: GoldenRecord) -> None:
    """Every recorded expert row, to the bit."""
    for one in golden.experts:
        if one.layer >= experts.info.layers or one.expert >= experts.info.experts:
            raise SelfTestFailed(f"the golden record has an expert {one.expert} of layer {one.layer}: there is none")
        if digest(expert_row(experts, one.layer, one.expert)) != one.sha256:
            raise SelfTestFailed(f"expert {one.expert} of layer {one.layer} answers other bits than were recorded")


def check_twin(experts: Experts) -> None:
    """Without a record: the first and the last of the chosen experts against numpy, to the bit."""
    chosen = chosen_experts(experts.info)
    for layer, expert in {chosen[0], chosen[-1]}:
        x = fixed_input(layer, expert, experts.info.hidden)[0]
        truth = reference.expert(experts.info.layout, bytes(experts.record(layer, expert)), x)
        if truth.tobytes() != expert_row(experts, layer, expert).tobytes():
            raise SelfTestFailed(f"expert {expert} of layer {layer}: the kernel answers other bits than its plain twin")


def answer(
    runner: Runner, prompt: Sequence[int], forced: Sequence[int] | None, *, chunk: int = PROMPT_TOKENS
) -> list[Row]:
    """Logits [V] after the prompt and after each of DECODE_STEPS tokens: the forced ones, else the best."""
    rows: list[Row] = []
    slot = runner.begin(len(prompt) + DECODE_STEPS)
    try:
        for start in range(0, len(prompt), chunk):
            last = start + chunk >= len(prompt)
            ids = list(prompt[start : start + chunk])
            logits = _step(runner, Window.of_sequence(ids, start, slot, logits="last" if last else "none"))
        rows.append(_finite(logits))
        for step in range(DECODE_STEPS):
            token = forced[step] if forced else int(rows[-1].argmax())
            rows.append(_finite(_step(runner, Window.of_sequence([token], len(prompt) + step, slot))))
    finally:
        runner.end(slot)
    return rows


def check_step(number: int, wanted: StepLogits, logits: Row, tolerance: float) -> None:
    """One step's logits against the record."""
    allowed = tolerance * wanted.scale
    off = max(abs(float(logits[token]) - value) for token, value in wanted.top)
    found = shorten(logits)
    off = max(off, abs(found.rms - wanted.rms), abs(found.scale - wanted.scale))
    if not off <= allowed:
        raise SelfTestFailed(f"step {number}: logits are {off:.3g} off the golden record, {allowed:.3g} are allowed")
    lead = wanted.top[0][1] - wanted.top[1][1] if len(wanted.top) > 1 else 0.0
    if lead > 2 * allowed and found.top[0][0] != wanted.top[0][0]:
        raise SelfTestFailed(f"step {number}: the best token is not the golden record's")


def shorten(logits: Row) -> StepLogits:
    """What a record keeps of a step."""
    order = np.lexsort((np.arange(logits.shape[0]), -logits))[:TOP]  # ties: the lowest id first
    top = tuple((int(token), float(logits[token])) for token in order)
    wide = logits.astype(np.float64)
    return StepLogits(float(np.abs(wide).max()), float(np.sqrt((wide * wide).mean())), top)


def _step(runner: Runner, window: Window) -> Logits:
    logits = runner.forward(window, lambda: False)
    runner.end_window()
    assert logits is not None, "nobody asked to stop"
    return logits


def _finite(logits: Logits) -> Row:
    row: Row = logits[0].copy()
    if not np.isfinite(row).all():
        raise SelfTestFailed("the model's logits are not finite")
    return row
