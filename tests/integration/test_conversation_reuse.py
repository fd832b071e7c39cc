"""A conversation taken up again says what one read from the beginning says, and reads hardly more than what is new.

EXPRESSWAY_CONVERSATIONS sets how many conversations are split at how many points (50 x 5 is run by hand),
EXPRESSWAY_CONVERSATIONS_MODEL of which model: tiny, with random weights and random tokens, or a pack, which then reads
this repository's own sources.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.checkpoint import write_checkpoint
from bench.near_tie import tolerance
from bench.tiny_model import PRESETS
from laneproto.chain import BLOCK_TOKENS
from lanes.tolerance import Compared, Tolerance, compare
from shared_experts.convert import convert
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack
from tests.fakes.talk import Talk, loaded

CONVERSATIONS, SPLITS = (int(n) for n in os.environ.get("EXPRESSWAY_CONVERSATIONS", "4x2").split("x"))
MODEL = os.environ.get("EXPRESSWAY_CONVERSATIONS_MODEL", "tiny")
ANSWER = 6
CONTEXT = 2048
KEPT_BYTES = (8 if MODEL == "tiny" else 64) << 20
CUTS = (64, 1, 48, 16)  # rows a chunk
QUANTILES = {"median": 0.5, "90th": 0.9, "99th": 0.99, "most": 1.0}
SOURCES = Path(__file__).parents[2] / "coordinator"


Windows = list[tuple[int, list[int]]]  # (start, ids) of each


def made(folder, *, drafts=False):
    if MODEL != "tiny":
        return Path(MODEL)
    if not drafts:
        return tiny_pack(folder, "f32")
    source = write_checkpoint(folder / "source", PRESETS["tiny"], 0, tokenizer=False, mtp=drafts)
    convert(source, folder / "made.pack", experts="f32", dense="f32", threads=1)
    return folder / "made.pack"


def tolerance_of(path: Path) -> Tolerance:
    """A pack's."""
    with Pack.open(path) as pack:
        return tolerance(pack)


@pytest.fixture
def text(tmp_path) -> Callable[[np.random.Generator, int], list[int]]:
    """Makes the tokens of a conversation: sources of 300 to 640 tokens for a pack, else 90 to 200 at random."""
    if MODEL == "tiny":
        return lambda rng, vocab: rng.integers(0, vocab, int(rng.integers(90, 200))).tolist()
    tokenizer = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json"))
    whole = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
    ids = tokenizer.encode(whole, add_special_tokens=False).ids

    def piece(rng: np.random.Generator, vocab: int) -> list[int]:
        length = int(rng.integers(300, 640))
        start = int(rng.integers(0, len(ids) - length))
        return ids[start : start + length]

    return piece


class Cold:
    """Runs of the same prompts that begin at nothing, in chunks of other sizes by turns, and how far they are off.

    A router's choice that stands on an edge falls the other way in one cut and not in another. With exact experts that
    is rare and far beyond the tolerance, so an answer then counts against another cut; of quantised ones every answer
    counts against its one cut.
    """

    def __init__(self, model, store, allowed: Tolerance) -> None:
        self._model, self._store, self._allowed = model, store, allowed
        self._all: list[Compared] = []
        self._edges = 0

    def add(self, prompt, ids, logits) -> None:
        """One answer and its logits [answer tokens, V]."""
        first, exact = len(self._all), self._allowed.most == self._allowed.common
        for attempt in range(len(CUTS) if exact else 1):
            chunk = CUTS[(first + attempt) % len(CUTS)]
            cold = Talk(self._model, self._store, kept_bytes=0, context=CONTEXT, chunk=chunk)
            _, truth, begun = cold.turn(prompt, len(ids), forced=ids)
            assert begun.cached_tokens == 0
            found = compare(logits, truth, self._allowed)
            self._edges += attempt == 1
            if found.held(self._allowed):
                break
        self._all.append(found)

    def judge(self) -> str:
        """All rows together are margin-equal; the figures."""
        offs = np.concatenate([each.offs for each in self._all])
        other, sure = (sum(getattr(each, name) for each in self._all) for name in ("other", "sure"))
        text = ", ".join(f"{name} {np.quantile(offs, q):.1e}" for name, q in QUANTILES.items())
        over = sum(bool((each.offs > self._allowed.common).any()) for each in self._all)
        text += (
            f" of scale; {over} answers with a row over {self._allowed.common:.0e}; {other} other ids of {sure} sure"
        )
        assert Compared(offs, sure, other).held(self._allowed), text
        assert self._edges <= len(self._all) // 8
        return f"{text}; {self._edges} on an edge"


class Lineages:
    """Which windows every state came from, so that the same ones can be read again from an empty state."""

    def __init__(self) -> None:
        self._known: list[Windows] = [[]]

    def after(self, prompt: list[int], begun: int, windows: Windows) -> list[Windows]:
        """All that may have led to a turn that began with `begun` tokens of `prompt` and then read `windows`."""
        found = []
        for lineage in self._known:
            kept = [(start, ids) for start, ids in lineage if start + len(ids) <= begun]
            if [token for _, ids in kept for token in ids] == prompt[:begun] and kept not in found:
                found.append(kept)
        led = [[*kept, *windows] for kept in found]
        self._known += led
        return led


def test_a_turn_goes_on_as_a_cold_run(tmp_path, text):
    rng, read_again, pack = np.random.default_rng(7), 0, made(tmp_path)
    with loaded(pack) as (model, store):
        found = Cold(model, store, tolerance_of(pack))
        warm = Talk(model, store, kept_bytes=KEPT_BYTES, context=CONTEXT)
        for _ in range(CONVERSATIONS):
            whole, lineages = text(rng, model.spec.vocab), Lineages()
            for split in sorted(rng.choice(np.arange(1, len(whole)), SPLITS, replace=False).tolist()):
                first, _, begun = warm.turn(whole[:split], ANSWER)
                assert begun.cached_tokens < split
                lineages.after(whole[:split], begun.cached_tokens, warm.windows)
                prompt = [*whole[:split], *first, *whole[split:]]
                ids, logits, again = warm.turn(prompt, ANSWER)
                new = len(prompt) - split - ANSWER
                assert len(prompt) - again.cached_tokens <= new + BLOCK_TOKENS
                read_again = max(read_again, len(prompt) - again.cached_tokens - new)
                cold = Talk(model, store, kept_bytes=0, context=CONTEXT)
                led = lineages.after(prompt, again.cached_tokens, warm.windows)
                assert any(np.array_equal(cold.replay(windows, ANSWER), logits) for windows in led)
                found.add(prompt, ids, logits)
                assert warm.states.reserved_bytes <= warm.states.budget_bytes
    print(f"\n{CONVERSATIONS} conversations x {SPLITS} splits, {MODEL}: at most {read_again} tokens read again")
    print("all bit-equal to the same windows from nothing; against others:", found.judge())


def test_a_turn_with_drafts_goes_on_as_a_cold_run_without(tmp_path, text):
    """Windows of right, wrong and half right drafts, ends of sequence among them; the draft layer guesses beside."""
    rng, read_again = np.random.default_rng(8), 0
    counted = [0, 0]  # drafts, right ones
    pack = made(tmp_path, drafts=True)
    with loaded(pack, drafts=True) as (model, store):
        found = Cold(model, store, tolerance_of(pack))
        warm, eos = Talk(model, store, kept_bytes=KEPT_BYTES, context=CONTEXT), model.spec.eos_ids[0]

        def drafts(coming):
            tried = coming[: int(rng.integers(0, 4))]
            wrong = int(rng.integers(0, len(tried) + 2))  # the place of the first wrong one, perhaps past the end
            if wrong < len(tried):
                tried = [*tried[:wrong], eos if rng.random() < 0.3 else (tried[wrong] + 1) % model.spec.vocab]
                tried += coming[len(tried) : len(tried) + 1]
            counted[0] += len(tried)
            counted[1] += min(wrong, len(tried))
            return tried

        for _ in range(CONVERSATIONS):
            whole = text(rng, model.spec.vocab)
            for split in sorted(rng.choice(np.arange(1, len(whole)), SPLITS, replace=False).tolist()):
                first, second = (text(rng, model.spec.vocab)[: 2 * ANSWER] for _ in range(2))
                first[int(rng.integers(1, ANSWER))] = second[int(rng.integers(1, ANSWER))] = eos
                warm.turn(whole[:split], len(first), forced=first, drafts=drafts)
                prompt = [*whole[:split], *first, *whole[split:]]
                _, logits, again = warm.turn(prompt, len(second), forced=second, drafts=drafts)
                new = len(prompt) - split - len(first)
                assert len(prompt) - again.cached_tokens <= new + BLOCK_TOKENS
                read_again = max(read_again, len(prompt) - again.cached_tokens - new)
                found.add(prompt, second, logits)
                assert warm.states.reserved_bytes <= warm.states.budget_bytes
    assert counted[1] > 0
    print(f"\n{CONVERSATIONS} conversations x {SPLITS} splits, {MODEL}, {counted[1]} of {counted[0]} drafts right:")
    print(f"at most {read_again} tokens read again; against a cold run without drafts:", found.judge())


def test_branches_share_a_root_and_differ_afterwards(tmp_path):
    rng = np.random.default_rng(3)
    pack = tiny_pack(tmp_path, "f32")
    with loaded(pack) as (model, store):
        warm = Talk(model, store, kept_bytes=KEPT_BYTES, context=CONTEXT)
        root = rng.integers(0, model.spec.vocab, 150).tolist()
        branches = [[*root, *rng.integers(0, model.spec.vocab, 20).tolist()] for _ in range(3)]
        known = [0, 150, 150]
        for _ in range(2):
            for number, branch in enumerate(branches):
                ids, logits, begun = warm.turn(branch, ANSWER, hints=[len(root)])
                assert begun.cached_tokens == known[number]
                _, truth, _ = Talk(model, store, kept_bytes=0, context=CONTEXT).turn(branch, ANSWER, forced=ids)
                assert compare(logits, truth, tolerance_of(pack)).held(tolerance_of(pack))
                known[number] = len(branch) + ANSWER - 1
                branch += [*ids, 5, 6]
