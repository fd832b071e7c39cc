"""The writer of small checkpoints: what it writes is what transformers reads, and what transformers writes converts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.checkpoint import PRESETS, TinyConfig, main, write_checkpoint
from bench.tokenizer import ENDOFTEXT, IM_END, SPECIAL_TOKENS, write_tokenizer
from shared_experts.convert import convert
from shared_experts.pack import Pack
from tests.fakes.checkpoints import SMALL, small_checkpoint

VARIED = replace(SMALL, ple_layer_ids=(1, 3), attention_bias=True, linear_num_key_heads=3, linear_num_value_heads=9)


@pytest.fixture(scope="module")
def transformers():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return pytest.importorskip("transformers")


def load(transformers, path):
    import torch

    model, report = transformers.Qwen4ExpForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TinyConfig(), {"tokenizer": True}),
        (SMALL, {"layout": "fused", "prefix": "model.language_model.", "shards": 3, "dtype": "bf16"}),
        (SMALL, {"prefix": "model.language_model.", "mtp": False}),
        (VARIED, {"dtype": "f16", "shards": 2}),
        (replace(SMALL, tie_word_embeddings=True), {}),
    ],
    ids=["tiny", "fused", "prefixed", "varied", "tied"],
)
def test_transformers_finds_every_tensor(transformers, tmp_path, config, options):
    load(transformers, small_checkpoint(tmp_path / "c", config, **options))


@pytest.mark.parametrize("original", [True, False])
def test_what_transformers_saves_converts(transformers, tmp_path, original):
    """Both of its on-disk layouts, against the values that it holds in memory."""
    model = load(transformers, small_checkpoint(tmp_path / "c", VARIED, mtp=False))
    model.save_pretrained(tmp_path / "saved", save_original_format=original)
    convert(tmp_path / "saved", tmp_path / "p", experts="f32", dense="f32")
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
        reader = pack.dense()
        for name in reader.names():
            _, shape, data = reader.read(name)
            np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(shape), state.pop(name), err_msg=name)
        for layer in (0, 2):
            at = f"model.layers.{layer}.ple.ple_embedding"
            table = state.pop(f"{at}.ngram_embedding.weight")
            np.testing.assert_array_equal(pack.ngram(layer).rows(np.arange(len(table))), table)
            info = pack.ngram(layer).info
            assert list(info.multipliers) == state.pop(f"{at}.layer_multipliers").tolist()
            assert list(info.head_offsets) == state.pop(f"{at}.ngram_heads_offsets").tolist()
            assert list(info.head_vocab_sizes) == state.pop(f"{at}.ngram_heads_vocab_sizes").tolist()
        info = pack.manifest.experts
        records = np.fromfile(pack.experts_path, np.uint8).reshape(info.layers, info.experts, -1).view("<f4")
        for layer in range(info.layers):
            gate_up = state.pop(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            down = state.pop(f"model.layers.{layer}.mlp.experts.down_proj")
            np.testing.assert_array_equal(records[layer, :, : gate_up[0].size], gate_up.reshape(info.experts, -1))
            start = info.layout.down_codes // 4
            np.testing.assert_array_equal(
                records[layer, :, start : start + down[0].size], down.reshape(info.experts, -1)
            )
    assert state == {}


def test_logits_are_lively(transformers, tmp_path):
    import torch

    path = write_checkpoint(tmp_path / "c", TinyConfig(), 3)
    model = load(transformers, path)
    ids = torch.randint(5, 512, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(ids, output_router_logits=True)
    assert 1 < float(out.logits.std()) < 4
    chosen = torch.stack([r.topk(4).indices for r in out.router_logits])  # [layers, tokens, 4]
    for layer in chosen:
        assert len(layer.unique()) > 8
        assert len({tuple(sorted(row.tolist())) for row in layer}) > 10


def test_one_seed_is_one_model_and_another_is_another(tmp_path):
    one = load_file(small_checkpoint(tmp_path / "a") / "model.safetensors")
    same = load_file(small_checkpoint(tmp_path / "b", prefix="model.language_model.") / "model.safetensors")
    other = load_file(small_checkpoint(tmp_path / "c", seed=1) / "model.safetensors")
    for name, value in one.items():
        np.testing.assert_array_equal(value, same[name.replace("model.", "model.language_model.", 1)])
    assert not np.array_equal(one["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("vocab", [261, 300, 512, 2048])
def test_tokenizer_fills_the_vocabulary_and_round_trips(tmp_path, vocab):
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, vocab)
    first = (tmp_path / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(first.decode())
    assert tokenizer.get_vocab_size() == vocab
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    for text in (
        "Hello, world!\n\n\tdef f(x):\n",
        "naïve 雪 \U0001f600",
        "",
        "12345",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    write_tokenizer(tmp_path, vocab)
    assert (tmp_path / "tokenizer.json").read_bytes() == first


def test_ends_of_text_are_where_the_configs_say(tmp_path):
    path = write_checkpoint(tmp_path / "c", SMALL)
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == ENDOFTEXT
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [IM_END, ENDOFTEXT]
    with pytest.raises(ValueError, match="eos_token_id is 0"):
        write_checkpoint(tmp_path / "d", replace(SMALL, eos_token_id=1))
    with pytest.raises(ValueError, match="at least 261"):
        write_checkpoint(tmp_path / "e", replace(SMALL, vocab_size=260))


def test_presets_convert(tmp_path):
    for name, experts in (("tiny", "q4g32"), ("demo", "q4g64")):
        write_checkpoint(tmp_path / name, PRESETS[name], dtype="bf16")
        convert(tmp_path / name, tmp_path / f"{name}-pack", experts=experts)


def test_what_it_writes_unasked_is_packed_in_the_format_of_pack_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.checkpoint", str(tmp_path / "c"), "--layers", "2"])
    main()
    manifest = convert(tmp_path / "c", tmp_path / "p", threads=1)
    assert (manifest.experts.format, manifest.experts.layers) == ("q4g64", 3)
