"""Trial windows on the whole model: nothing moves before the commit, and after it only what was accepted has happened.

Rejections at every position and of every length, at contexts around block edges, the indexer's budget and the
convolutions' reach, with an eos among the rows.
"""

import random

import pytest
import torch

from bench.tiny_model import TinyConfig
from lanes.models.errors import WindowError
from lanes.window import Window
from tests.fakes.reference_drafts import ReferenceDrafts
from tests.fakes.reference_model import TOLERANCE, disagreement, twins

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
TINY = TinyConfig(
    num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, eos_token_id=EOS, ngram_vocab_size_base=200,
    layer_types=("linear_attention", "linear_attention", "full_attention", "full_attention"),
)  # fmt: skip
CONTEXTS = (1, 2, 3, 4, 5, 8, 11, 31, 32, 33, 34, 35, 36, 47, 48, 64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with twins(folder, TINY, drafts=True) as pair:
        yield pair, ReferenceDrafts(pair.reference, folder / "checkpoint")


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, 512), k=length)


def wrong(token: int) -> int:
    return (token + 250) % 510 + 2


def snapshot(state) -> list[torch.Tensor]:
    """Everything of a state that counts."""
    length = state.length
    rows = {
        layer: length - (state.draft.waiting if layer == state.shape.draft.layer else 0) for layer in state.attention
    }
    kept = [torch.tensor([length, state.draft.waiting, state.broken]), state.context_ids]
    kept += [x for r in state.recurrent.values() for x in (r.matrix, r.conv)] + [n.conv for n in state.ngram.values()]
    for layer, a in state.attention.items():
        n, blocks = rows[layer], rows[layer] // a.shape.block_tokens
        kept += [a.keys[:, :n], a.values[:, :n], a.raw_index_keys[:n], a.block_keys[:blocks]]
    kept += [state.draft.streams[: state.draft.waiting], state.draft.ids[: state.draft.waiting]]
    return [x.clone() for x in kept]


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def trial(twin, state, ids, start) -> torch.Tensor:
    window = Window.of_sequence(ids, start, 0, logits="all", trial=True)
    return twin.model.forward(window, {0: state})


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_rejection_at_every_place(pair, context):
    (twin, drafts), total = pair, 4
    ids = prompt(context + total + 3, seed=context)
    if context % 3 == 0:
        ids[context + 1] = EOS  # among the rows: it resets the n-grams of what follows
    expected = twin.expected(ids)
    expected_drafts, _ = drafts.logits(drafts.streams(ids), [*ids[1:], 7])
    for rows in range(1, total + 1):
        for right in range(1, rows + 1):
            state = twin.state()
            twin.logits(ids[:context], 19, state)
            if (rows + right) % 2:  # the draft layer has read what it could, and has guessed past the end
                for number in range(3):
                    twin.model.guess(state, wrong(ids[context]), number)
            before = snapshot(state)
            tried = [*ids[context : context + right], *map(wrong, ids[context + right : context + rows])]
            logits = trial(twin, state, tried, context)
            assert equal(snapshot(state), before), "a trial that is not committed has not happened"
            assert disagreement(logits[:right], expected[context : context + right]) < TOLERANCE
            twin.model.commit(state, right)
            after = context + right
            assert state.length == after
            # what follows: a single row, then rows over the place of the rejected ones
            rest = twin.logits(ids[after : after + 1], 1, state)
            rest = torch.cat((rest, twin.logits(ids[after + 1 : context + total + 2], 3, state)))
            assert disagreement(rest, expected[after : context + total + 2]) < TOLERANCE, (rows, right)
            guess = twin.model.guess(state, ids[context + total + 2], 0)
            assert disagreement(guess, expected_drafts[context + total + 1]) < TOLERANCE, (rows, right)


def test_a_trial_that_is_dropped_has_not_happened(pair):
    """Two states, one with trials in between: the same bits afterwards."""
    (twin, _), ids = pair, prompt(60, seed=3)
    plain, tried = twin.state(), twin.state()
    for start in range(0, 60, 5):
        trial(twin, tried, list(map(wrong, ids[start : start + 4])), start)
        assert equal(*(twin.logits(ids[start : start + 5], 5, state)[None] for state in (plain, tried)))
    assert equal(snapshot(plain), snapshot(tried))


def test_the_same_rows_on_trial_and_for_good_are_bit_equal(pair):
    (twin, _), ids = pair, prompt(60, seed=4)
    plain, tried = twin.state(), twin.state()
    for start in range(0, 60, 4):
        expected = twin.logits(ids[start : start + 4], 4, plain)
        assert torch.equal(trial(twin, tried, ids[start : start + 4], start), expected)
        twin.model.commit(tried, 4)
        assert equal(snapshot(plain), snapshot(tried))


def test_a_trial_left_half_way_leaves_the_state_whole(pair):
    (twin, _), ids = pair, prompt(40, seed=5)
    state = twin.state()
    twin.logits(ids[:36], 36, state)
    before = snapshot(state)

    class Left(Exception):
        pass

    class Stopping:
        def expect(self, *_: object) -> None:
            pass

        def forward(self, *_: object) -> torch.Tensor:
            raise Left

    moe = twin.model.blocks[-1].block
    experts, moe.experts = moe.experts, Stopping()
    try:
        with pytest.raises(Left):
            trial(twin, state, ids[36:], 36)
    finally:
        moe.experts = experts
    assert equal(snapshot(state), before)
    assert disagreement(twin.logits(ids[36:], 1, state), twin.expected(ids)[36:]) < TOLERANCE


def test_rows_on_trial_follow_the_state_like_any(pair):
    twin, _ = pair
    state = twin.state()
    with pytest.raises(WindowError, match="positions must be 0"):
        trial(twin, state, [5, 6], 1)
