"""From a checkpoint through a pack to logits: layouts, types, native and 4-bit experts, and passes that fail."""

import dataclasses
import random
import types

import pytest
import torch
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from bench.checkpoint import write_checkpoint
from bench.quality import Divergence, opened
from bench.tiny_model import PRESETS, TinyConfig
from lanes.models import load_model
from lanes.models.errors import ConfigError, WeightError, WindowError
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.weights import Weights
from lanes.state.errors import CapacityExceeded
from lanes.window import Window
from tests.fakes.reference_model import (
    TOLERANCE,
    Twins,
    disagreement,
    lowest_index_topk,
    naive_experts,
    pack_of,
    twins,
)

torch.set_num_threads(1)  # test workers share the cores

CONFIG = TinyConfig(
    num_hidden_layers=3, layer_types=("linear_attention", "full_attention", "full_attention"), ple_layer_ids=(1,),
    num_experts=8, num_experts_per_tok=3, ngram_vocab_size_base=200,
)  # fmt: skip
IDS = random.Random(3).choices(range(10, 512), k=60)


def ours(source, *, experts="f32", dense="f32", dtype=None) -> torch.Tensor:
    with pack_of(source, experts, dense) as pack:
        model = load_model(pack, naive_experts(pack), dtype=dtype)
        assert isinstance(model, Qwen4Exp)
        return Twins(None, model).logits(IDS, 32)  # type: ignore[arg-type]


@torch.no_grad()
def theirs(source, dtype: torch.dtype) -> torch.Tensor:
    model = Qwen4ExpForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager").eval()
    with lowest_index_topk():
        return model(torch.tensor([IDS]), use_cache=False).logits[0].float()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "checkpoint", CONFIG, tokenizer=False)


@pytest.fixture(scope="module")
def expected(source):
    return theirs(source, torch.float32)


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_every_layout_of_a_checkpoint(tmp_path, expected, layout, prefix):
    source = write_checkpoint(tmp_path / "checkpoint", CONFIG, layout=layout, prefix=prefix, shards=3, tokenizer=False)
    assert disagreement(ours(source), expected) < TOLERANCE


def test_native_f32_experts(source, expected, tmp_path):
    with opened(source, tmp_path, "f32") as (pack, experts):
        model = load_model(pack, experts["as_served"])
        assert disagreement(Twins(None, model).logits(IDS, 7), expected) < TOLERANCE  # type: ignore[arg-type]


def test_a_bf16_pack_on_a_cpu_is_exact(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", CONFIG, dtype="bf16", tokenizer=False)
    assert disagreement(ours(source, dense="bf16"), theirs(source, torch.float32)) < TOLERANCE


def test_bf16_matrices_lose_no_more_than_the_reference_in_bf16(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", CONFIG, dtype="bf16", tokenizer=False)
    truth = theirs(source, torch.float32)
    mine, reference = Divergence(), Divergence()
    mine.add(truth, ours(source, dense="bf16", dtype=torch.bfloat16))
    reference.add(truth, theirs(source, torch.bfloat16))
    assert 0 < mine.summary()["kl_mean_nats"] < 1.5 * reference.summary()["kl_mean_nats"]


def test_experts_of_four_and_eight_bits(tmp_path):
    config = dataclasses.replace(
        PRESETS["demo"], num_hidden_layers=1, layer_types=("full_attention",), ple_layer_ids=(), num_experts=8
    )
    source = write_checkpoint(tmp_path / "checkpoint", config, tokenizer=False, mtp=False)
    truth, found = theirs(source, torch.float32), {}
    for name in ("q4g64", "q4g32", "q8"):
        with opened(source, tmp_path, name) as (pack, experts):
            for how in ("as_served", "exact_activations"):
                found[name, how] = Divergence()
                found[name, how].add(truth, Twins(None, load_model(pack, experts[how])).logits(IDS, 32))  # type: ignore[arg-type]
    kl = {key: divergence.summary()["kl_mean_nats"] for key, divergence in found.items()}
    assert 0 < kl["q4g32", "as_served"] < kl["q4g64", "as_served"] < 0.1
    assert 0 < kl["q8", "as_served"] < kl["q4g32", "as_served"] / 10
    assert 0 < kl["q8", "exact_activations"] < kl["q8", "as_served"]
    for name in ("q4g64", "q4g32"):  # int8 activations cost next to nothing beside 4-bit weights
        assert kl[name, "as_served"] < 1.2 * kl[name, "exact_activations"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with twins(tmp_path_factory.mktemp("model"), CONFIG) as pair:
        yield pair


def test_a_pass_that_fails_breaks_its_states_until_a_reset(pair, monkeypatch):
    pool = pair.pool()
    hurt, well = pool.open(64), pool.open(64)
    pair.model.forward(Window.of_sequence(IDS[:5], 0, hurt), pool)
    pair.model.forward(Window.of_sequence(IDS[:5], 0, well), pool)

    def fail(x: torch.Tensor, rows: object) -> torch.Tensor:
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(pair.model, "blocks", [*pair.model.blocks[:3], fail])
        with pytest.raises(RuntimeError, match="half way"):
            pair.model.forward(Window.of_sequence(IDS[5:9], 5, hurt), pool)
    assert (pool[hurt].broken, pool[hurt].length, pool[well].broken) == (True, 5, False)
    with pytest.raises(WindowError, match="reset the state first"):
        pair.model.forward(Window.of_sequence(IDS[5:9], 5, hurt), pool)
    pool.reset(hurt)
    again = torch.cat([pair.model.forward(Window.of_sequence(IDS[a:b], a, hurt), pool) for a, b in ((0, 5), (5, 9))])
    assert torch.equal(again[1:], pair.model.forward(Window.of_sequence(IDS[5:9], 5, well), pool))


@pytest.mark.parametrize(
    ("ids", "positions", "slots", "reason"),
    [
        ([512], [0], [0], "token ids must be in 0..511"),
        ([-1], [0], [0], "token ids must be in 0..511"),
        ([5], [1], [0], "positions must be 0..0"),
        ([5, 6], [0, 2], [0, 0], "positions must be 0..1"),
        ([5, 6], [1, 0], [0, 0], "positions must be 0..1"),
        ([5, 6, 7], [0, 0, 1], [0, 1, 0], "contiguous"),
    ],
)
def test_windows_that_do_not_continue_their_states(pair, ids, positions, slots, reason):
    states = {0: pair.state(), 1: pair.state()}
    window = Window.of_rows(*map(torch.tensor, (ids, positions, slots)), torch.ones(len(ids), dtype=torch.bool))
    with pytest.raises(WindowError, match=reason):
        pair.model.forward(window, states)
    assert not any(state.broken or state.length for state in states.values())


def test_a_sequence_that_is_full(pair):
    states = {0: pair.state(4)}
    pair.model.forward(Window.of_sequence(IDS[:4], 0, 0), states)
    with pytest.raises(CapacityExceeded):
        pair.model.forward(Window.of_sequence(IDS[4:5], 4, 0), states)
    assert (states[0].length, states[0].broken) == (4, False)


def test_another_architecture_is_refused():
    pack = types.SimpleNamespace(manifest=types.SimpleNamespace(architecture="deepseek_v4", dense_dtype="bf16"))
    with pytest.raises(ConfigError, match="qwen4_exp"):
        load_model(pack, None)  # type: ignore[arg-type]


def test_wrong_tensors_are_named():
    tensors = {"a.x": torch.zeros(2, 3), "a.y": torch.zeros(2, dtype=torch.int64)}
    weights = Weights(tensors.__getitem__, torch.device("cpu"), torch.float32).under("a")
    with pytest.raises(WeightError, match=r"'a\.z': is missing"):
        weights.vector("z", 1)
    with pytest.raises(WeightError, match=r"'a\.x': has shape \(2, 3\), \(3, 2\) was expected"):
        weights.matrix(("x", 3), columns=2)
    with pytest.raises(WeightError, match="floating-point"):
        weights.vector("y", 2)
    assert weights.matrix(("x", 2), ("x", 2), columns=3).shape == (4, 3)
