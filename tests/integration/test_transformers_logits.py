"""The model against transformers: teacher-forced logits, greedy ids, chunks, shared windows; fp32, f32 experts.

Scale is the greatest |logit| of the reference over the prompt; the tolerance is 2e-4 of it.
"""

import dataclasses
import random

import pytest
import torch

from bench.tiny_model import TinyConfig
from lanes.window import Window
from tests.fakes.reference_model import TOLERANCE, disagreement, margins, twins

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1
TINY = TinyConfig(
    num_hidden_layers=4, num_experts=8, num_experts_per_tok=3, eos_token_id=EOS, ngram_vocab_size_base=200,
    layer_types=("linear_attention", "linear_attention", "full_attention", "full_attention"),
)  # fmt: skip

CONFIGS = {
    "eight layers": TinyConfig(eos_token_id=EOS),
    "several n-gram layers, order 4": dataclasses.replace(
        TINY, num_hidden_layers=5, ple_layer_ids=(1, 2, 4), ngram_size=4, heads_per_ngram=2, ple_embed_dim=60,
        layer_types=("linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"),
    ),
    "odd head counts": dataclasses.replace(
        TINY, hidden_size=48, num_attention_heads=9, num_key_value_heads=3, head_dim=24, linear_num_key_heads=3,
        linear_num_value_heads=15, linear_key_head_dim=12, linear_value_head_dim=20, indexer_n_heads=3,
        ple_embed_dim=40, partial_rotary_factor=0.25, mrope_section=(1, 1, 1),
    ),
    "one expert chosen": dataclasses.replace(TINY, num_experts_per_tok=1),
    "all experts chosen, weights as they are, silu gate": dataclasses.replace(
        TINY, num_experts_per_tok=8, norm_topk_prob=False, output_gate_type="silu"
    ),
    "three streams": dataclasses.replace(TINY, hc_count=3, hc_lowrank=5),
    "two streams, bigrams only, short convolutions": dataclasses.replace(
        TINY, hc_count=2, ngram_size=2, heads_per_ngram=8, ple_conv_kernel_size=2, linear_conv_kernel_dim=2
    ),
    "all dimensions rotated, tied, biased": dataclasses.replace(
        TINY, head_dim=16, partial_rotary_factor=1.0, tie_word_embeddings=True, attention_bias=True,
        mrope_section=(4, 2, 2),
    ),
    "budget as large as the context": dataclasses.replace(TINY, indexer_budget=128, indexer_compress_ratio=8),
    "budget of two blocks, one index head, many ties": dataclasses.replace(
        TINY, indexer_budget=4, indexer_compress_ratio=2, indexer_n_heads=1, partial_rotary_factor=0.5,
        mrope_section=(4, 2, 2),
    ),
    "blocks of one token, budget of one": dataclasses.replace(TINY, indexer_budget=1, indexer_compress_ratio=1),
    "attention only": dataclasses.replace(TINY, layer_types=("full_attention",) * 4, ple_layer_ids=()),
    "recurrent only, no n-grams": dataclasses.replace(
        TINY, layer_types=("linear_attention",) * 4, ple_layer_ids=(), linear_conv_kernel_dim=3
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    with twins(tmp_path_factory.mktemp("model"), CONFIGS[request.param]) as pair:
        yield pair


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with twins(tmp_path_factory.mktemp("model"), TINY) as pair:
        yield pair


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids with an eos at the start, two in a row further on, and one near the end."""
    ids = random.Random(seed).choices(range(2, 512), k=length)
    for place in (0, length // 3, length // 3 + 1, length - 3):
        ids[place] = EOS
    return ids


def test_teacher_forced_logits_in_every_chunking(pair):
    ids = prompt(79)
    expected = pair.expected(ids)
    for chunk in (1, 7, 64, len(ids)):
        assert disagreement(pair.logits(ids, chunk), expected) < TOLERANCE, f"chunks of {chunk}"


def test_greedy_ids_for_64_tokens(pair):
    ids, state = prompt(21, seed=1), pair.state(128)
    length = len(ids)
    last = pair.logits(ids, 16, state)[-1:]
    while len(ids) < length + 64:
        ids.append(int(last.argmax()))
        last = pair.logits(ids[-1:], 1, state)
    expected = pair.expected(ids[:-1])[length - 1 :]
    sure = margins(expected) > TOLERANCE
    assert sure.float().mean() > 0.8
    assert torch.equal(expected.argmax(-1)[sure], torch.tensor(ids[length:])[sure])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_prompts(tiny, length):
    for ids in (prompt(9, seed=length)[-length:], [EOS] * length, list(range(2, 2 + length))):
        expected = tiny.expected(ids + prompt(12))
        state = tiny.state()
        ours = torch.cat((tiny.logits(ids, length, state), tiny.logits(prompt(12), 1, state)))
        assert disagreement(ours, expected) < TOLERANCE


@pytest.mark.parametrize("context", [33, 34, 35, 36, 37, 71])
def test_contexts_around_the_budget(tiny, context):
    # budget 32, blocks of 4: from position 35 on, a query has a ninth complete block and must choose eight
    ids = prompt(context, seed=context)
    assert disagreement(tiny.logits(ids, context), tiny.expected(ids)) < TOLERANCE


def test_sequences_in_one_window_equal_each_alone(pair):
    prompts = {0: prompt(50, seed=2), 3: prompt(17, seed=3), 1: prompt(30, seed=4)}
    alone = {slot: pair.logits(ids, len(ids)) for slot, ids in prompts.items()}
    states = {slot: pair.state() for slot in prompts}
    # windows of mixed rows: a long chunk beside a single row beside a short chunk
    cuts = {0: (0, 41, 42, 50), 3: (0, 1, 12, 17), 1: (0, 5, 6, 30)}
    together: dict[int, list[torch.Tensor]] = {slot: [] for slot in prompts}
    for step in range(3):
        parts = [(slot, cuts[slot][step], cuts[slot][step + 1]) for slot in prompts]
        window = join([Window.of_sequence(prompts[slot][a:b], a, slot, logits="all") for slot, a, b in parts])
        logits = pair.model.forward(window, states)
        for (slot, _, _), rows in zip(parts, logits.split([b - a for _, a, b in parts]), strict=True):
            together[slot].append(rows)
    for slot, expected in alone.items():
        assert disagreement(torch.cat(together[slot]), expected) < TOLERANCE


def join(windows: list[Window]) -> Window:
    of_rows = ("token_ids", "positions", "seq", "want_logits")
    return Window.of_rows(*(torch.cat([getattr(w, name) for w in windows]) for name in of_rows))


def test_only_wanted_rows_are_answered(tiny):
    ids = prompt(20)
    every = tiny.logits(ids, 20)
    last = tiny.model.forward(Window.of_sequence(ids, 0, 0), {0: tiny.state()})
    none = tiny.model.forward(Window.of_sequence(ids, 0, 0, logits="none"), {0: tiny.state()})
    assert last.shape == (1, 512)
    assert none.shape == (0, 512)
    assert disagreement(last, every[-1:]) < TOLERANCE


def test_a_repeat_is_bit_equal_and_a_reset_forgets(tiny):
    ids, state = prompt(60), tiny.state()
    first = tiny.logits(ids, 13, state)
    state.reset()
    assert torch.equal(tiny.logits(ids, 13, state), first)
    assert torch.equal(tiny.logits(ids, 13), first)


@pytest.mark.slow
def test_a_longer_context(tiny):
    ids = prompt(290, seed=9)
    expected = tiny.expected(ids)
    for chunk in (50, 290):
        assert disagreement(tiny.logits(ids, chunk), expected) < TOLERANCE
