"""The demo model's whole chain, very small: archives, tokens, training in two commands, export, packs, a lane."""

import dataclasses
import json
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import logging as transformers_logging
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from bench.quality import opened
from deploy.demo_model import evaluate, export
from deploy.demo_model.data.documents import Document
from deploy.demo_model.data.prepare import Corpus, collect, prepare
from deploy.demo_model.data.sources import Source
from deploy.demo_model.model.attention import Reading
from deploy.demo_model.model.network import How, Network
from deploy.demo_model.schedule import Phase, Plan
from deploy.demo_model.sizes import SMALL
from deploy.demo_model.train import Options, train
from lanes.models import load_model
from lanes.state.sequence import SequenceState
from lanes.window import Window
from shared_experts.convert import convert
from tests.fakes.reference_model import TOLERANCE, disagreement, lowest_index_topk, margins

AS_SERVED = How(Reading(budget=SMALL.indexer_budget))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


def lively() -> Network:
    """Random weights with no branch at zero."""
    torch.manual_seed(0)
    network = Network(SMALL)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.1 * (p.abs().mean() + 0.1) * torch.randn_like(p)
    return network


@pytest.fixture(scope="module")
def network():
    return lively()


@pytest.fixture(scope="module")
def checkpoint(network, tmp_path_factory):
    return export.write_checkpoint(
        tmp_path_factory.mktemp("model") / "checkpoint", SMALL, network.state_dict(), None, torch.float32
    )


def prompt(length: int) -> torch.Tensor:
    ids = torch.randint(1, SMALL.vocab_size, (1, length), generator=torch.Generator().manual_seed(5))
    ids[0, length // 3] = 0  # an end of text, which hides what is before it from n-grams
    return ids


@torch.no_grad()
def test_transformers_gives_the_same_logits(network, checkpoint):
    reference = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ids = prompt(90)
    with lowest_index_topk():
        expected = reference(ids, use_cache=False).logits[0]
    assert disagreement(network.logits(network(ids, AS_SERVED).x)[0], expected) < TOLERANCE
    assert disagreement(network.logits(network(ids).x)[0], expected) > TOLERANCE  # the indexer left something out


@torch.no_grad()
def test_the_draft_layer_is_one_of_transformers_layers(network, checkpoint):
    """Built of the reference's parts by the weights' names, as engines that draft with this architecture build it."""
    config = theirs.Qwen4ExpTextConfig.from_pretrained(checkpoint)
    config._attn_implementation = "eager"
    weights = export.read_weights(checkpoint)

    def part(module: torch.nn.Module, scope: str) -> torch.nn.Module:
        module.load_state_dict({k.removeprefix(scope): v for k, v in weights.items() if k.startswith(scope)})
        return module.eval()

    layer = part(theirs.Qwen4ExpTextDecoderLayer(config, SMALL.types.index("full_attention")), "mtp.layers.0.")
    mixer = part(theirs.Qwen4ExpTextGatedResidual(config, use_combine=False), "mtp.hyper_connection_mixer.")
    norm_embedding = part(theirs.Qwen4ExpTextRMSNorm(SMALL.hidden_size), "mtp.pre_fc_norm_embedding.")
    norm_hidden = part(theirs.Qwen4ExpTextRMSNorm(4 * SMALL.hidden_size), "mtp.pre_fc_norm_hidden.")
    ids = prompt(61)
    x, embedding = network(ids[:, :60], AS_SERVED).x, weights["model.embed_tokens.weight"]
    hidden = norm_hidden(x.flatten(2)).unflatten(2, (4, -1)) @ weights["mtp.fc_hidden.weight"].T
    entered = (norm_embedding(embedding[ids[:, 1:]]) @ weights["mtp.fc_embedding.weight"].T)[:, :, None] + hidden
    places = theirs.Qwen4ExpTextRotaryEmbedding(config)(x, torch.arange(1, 61)[None])
    mask = torch.full((60, 60), torch.finfo(torch.float32).min).triu(1)[None, None]
    with lowest_index_topk():
        expected = mixer(layer(entered.flatten(2), places, attention_mask=mask))[0] @ embedding.T
    passed = network.draft(x, ids, 1, AS_SERVED)[0]
    assert disagreement(network.draft_logits(passed.x)[0], expected) < TOLERANCE


@torch.no_grad()
def test_a_lane_writes_what_the_training_model_writes(network, checkpoint, tmp_path):
    ids, length = prompt(30)[0].tolist(), 30
    with opened(checkpoint, tmp_path, "f32") as (pack, experts):
        model = load_model(pack, experts["as_served"])
        state = SequenceState(model.state_shape, 128)
        last = model.forward(Window.of_sequence(ids, 0, 0), {0: state})
        while len(ids) < length + 40:
            ids.append(int(last[-1].argmax()))
            last = model.forward(Window.of_sequence(ids[-1:], len(ids) - 1, 0), {0: state})
    expected = network.logits(network(torch.tensor([ids[:-1]]), AS_SERVED).x)[0, length - 1 :]
    sure = margins(expected) > TOLERANCE
    assert sure.float().mean() > 0.8
    assert torch.equal(expected.argmax(-1)[sure], torch.tensor(ids[length:])[sure])


def test_two_packs_of_a_checkpoint_have_the_same_bytes(network, tmp_path):
    sizes = dataclasses.replace(SMALL, max_position_embeddings=32768)
    source = export.write_checkpoint(tmp_path / "checkpoint", sizes, network.state_dict(), None)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        manifest = convert(source, folder, experts="q4g64", threads=2)
    assert manifest.config["max_position_embeddings"] == 32768
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert export.read_config(source) == dataclasses.replace(sizes, layer_types=tuple(sizes.types))


def archive(folder, name: str, files: dict[str, str]) -> Source:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = (
            f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: MIT\n\n# The package {name}\n"
        )
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        for file, text in files.items():
            wheel.writestr(file, text)
    return Source("pypi", name, "1.0", "MIT", path.name)


def module(number: int) -> str:
    return "".join(
        f'def step_{number}_{i}(value, times):\n    """Multiply the value {i} times and add {number} to it."""\n'
        f"    for turn in range(times + {i}):\n        value = value * {number} + turn\n    return value\n\n\n"
        for i in range(12)
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    sources = [
        archive(folder, f"package{n}", {f"package{n}/m{i}.py": module(40 * n + i) for i in range(8)}) for n in range(3)
    ]
    corpus: Corpus = collect(sources, folder)
    assert {d.kind for d in corpus.train} == {"code", "chat"}
    corpus.held_out["code"] = [Document("other", "m.py", "code", module(997) * 6)]
    corpus.held_out["prose"] = [Document("other", "m.md", "prose", "Multiply the value and add to it.\n" * 120)]
    facts = prepare(corpus, folder / "out", SMALL.vocab_size)
    again = prepare(corpus, folder / "again", SMALL.vocab_size)
    assert facts == again
    return folder / "out"


def test_training_stops_goes_on_and_what_it_leaves_is_served(data, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "SHORT_TOKENS", 64)
    monkeypatch.setattr(evaluate, "LONG_TOKENS", 256)
    monkeypatch.setattr(evaluate, "BUDGETS", (16, None))
    out = tmp_path / "out"

    def options(minutes: float) -> Options:
        phases = Phase(2, 64, False, 1), Phase(1, 128, True, 0)
        plan = Plan(4e-3, None, 7, *phases, warm_up_steps=2, finish_from=0.7)
        return Options(plan, minutes, "cpu", True, False, log_every=1, check_every=2)

    torch.manual_seed(0)
    assert train(data, out, Network(SMALL), options(0.0)) is False  # no time at all: saved and exported as it began
    assert train(data, out, Network(SMALL), options(10.0)) is True
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert {line["sequence"] for line in lines if "sequence" in line} == {64, 128}
    assert lines[-1]["step"] == 7
    assert lines[-1]["tokens"] == 5 * 128 + 2 * 128
    assert lines[-1]["held_out_code_nats"] < lines[0]["held_out_code_nats"]

    result = evaluate.evaluate(export.read_network(out / "checkpoint").eval(), data, "cpu", 2, 1)
    for name in ("exact experts", "q8", "q4g64", "no n-gram table", "indexer budget 16", "indexer budget all"):
        assert 0 < result[name]["code"] < 20, name
    assert result["q4g64"] != result["exact experts"] != result["no n-gram table"]
    assert next(iter(result["by position"]["code"])).startswith("0-")
    for figures in result["drafts"].values():
        assert 1 <= figures["tokens_per_pass"][0] <= figures["tokens_per_pass"][2] <= 4

    with opened(out / "checkpoint", tmp_path, "q4g64") as (pack, experts):
        command = [sys.executable, "-m", "deploy.demo_model.routing", str(pack.experts_path.parent), str(data)]
        command += ["--requests", "2", "--prompt-tokens", "40", "--answer-tokens", "12"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        assert found["keys"] == len(SMALL.types) * SMALL.num_experts
        assert found["decode_windows"] > 0
        assert pack.file("tokenizer.json") == (data / "tokenizer.json").read_bytes()
        model = load_model(pack, experts["as_served"])
        state = SequenceState(model.state_shape, 128)
        assert model.forward(Window.of_sequence([5, 6, 7], 0, 0), {0: state}).isfinite().all()
