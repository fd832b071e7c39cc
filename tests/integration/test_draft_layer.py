"""The draft layer against a twin of transformers' parts: teacher-forced and chained, however its rows came about."""

import dataclasses
import random

import pytest
import torch

from bench.checkpoint import write_checkpoint
from bench.tiny_model import TinyConfig
from lanes.models import load_model
from lanes.models.errors import ConfigError
from lanes.window import Window
from tests.fakes.reference_drafts import ReferenceDrafts
from tests.fakes.reference_model import TOLERANCE, disagreement, naive_experts, pack_of, twins

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
TINY = TinyConfig(
    num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, eos_token_id=EOS, ngram_vocab_size_base=200,
    layer_types=("linear_attention", "linear_attention", "full_attention", "full_attention"),
)  # fmt: skip
CONFIGS = {
    "budget 32, blocks of 4": TINY,
    "biased, tied, budget of two blocks": dataclasses.replace(
        TINY, attention_bias=True, tie_word_embeddings=True, indexer_budget=4, indexer_compress_ratio=2, hc_count=3
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with twins(folder, CONFIGS[request.param], drafts=True) as pair:
        yield pair, ReferenceDrafts(pair.reference, folder / "checkpoint")


def prompt(length: int, seed: int = 0) -> list[int]:
    ids = random.Random(seed).choices(range(2, 512), k=length)
    ids[length // 3] = EOS
    return ids


@pytest.mark.parametrize("chunk", [1, 2, 5, 23, 100])
def test_teacher_forced_guesses(pair, chunk):
    """Chunks of one row wait and are read late; long ones are read as they come."""
    (twin, drafts), ids = pair, prompt(80)
    expected, _ = drafts.logits(drafts.streams(ids), [*ids[1:], 7])
    state = twin.state()
    for end in (1, 2, 3, 5, 31, 32, 33, 34, 37, 38, 70, 80):
        if end > state.length:
            twin.logits(ids[state.length : end], chunk, state)
        following = [*ids, 7][end]
        for _ in range(2):  # asking again changes nothing
            guess = twin.model.guess(state, following, 0)
            assert disagreement(guess, expected[end - 1]) < TOLERANCE, f"after {end} tokens"
        assert state.length == end
        assert state.draft.waiting == 1


def test_a_chain_of_guesses(pair):
    (twin, drafts), ids = pair, prompt(64)
    for length in (1, 3, 34, 35, 60):
        state = twin.state()
        twin.logits(ids[:length], 17, state)
        streams, following = drafts.streams(ids[:length]), ids[1 : length + 1]
        for number in range(4):
            expected, out = drafts.logits(streams, following)
            guess = twin.model.guess(state, following[-1], number)
            assert disagreement(guess, expected[-1]) < TOLERANCE, f"guess {number} after {length} tokens"
            streams = torch.cat((streams, out[-1:]))
            following = [*following, int(expected[-1].argmax())]
        # rows of guesses are gone: the sequence goes on otherwise, and the draft layer knows nothing of them
        twin.logits(ids[length : length + 3], 3, state)
        expected, _ = drafts.logits(drafts.streams(ids[: length + 3]), ids[1 : length + 4])
        assert disagreement(twin.model.guess(state, ids[length + 3], 0), expected[-1]) < TOLERANCE


def test_the_model_itself_is_the_same_with_its_draft_layer(pair):
    (twin, _), ids = pair, prompt(50)
    assert disagreement(twin.logits(ids, 20), twin.expected(ids)) < TOLERANCE


def test_several_sequences_in_one_window(pair):
    (twin, drafts), ids = pair, prompt(70)
    states = {0: twin.state(), 1: twin.state()}
    cut = 30
    window = Window.of_rows(
        torch.tensor(ids), torch.cat((torch.arange(cut), torch.arange(len(ids) - cut))),
        torch.tensor([0] * cut + [1] * (len(ids) - cut)), torch.zeros(len(ids), dtype=torch.bool),
    )  # fmt: skip
    twin.model.forward(window, states)
    for slot, part in ((0, ids[:cut]), (1, ids[cut:])):
        expected, _ = drafts.logits(drafts.streams(part), [*part[1:], 9])
        assert disagreement(twin.model.guess(states[slot], 9, 0), expected[-1]) < TOLERANCE


def test_a_pack_without_a_draft_layer_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", TINY, tokenizer=False, mtp=False)
    with pack_of(source, "f32") as pack, pytest.raises(ConfigError, match="mtp_num_hidden_layers"):
        load_model(pack, naive_experts(pack), drafts=True)
