"""Checkpoints become packs: the same values whatever the layout, prefix, type and number of shards."""

import errno
import fcntl
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.checkpoint import TinyConfig
from bench.tiny_model import hash_constants
from shared_experts import codecs
from shared_experts.checkpoint import Checkpoint
from shared_experts.convert import convert
from shared_experts.errors import CheckpointError, NativeMissing, PackError
from shared_experts.expert_record import decode_expert
from shared_experts.layout import record_offset
from shared_experts.pack import Pack
from shared_experts.qwen4_exp import NgramConstants, TextConfig
from tests.fakes.checkpoints import SMALL, edit_json, read_header, small_checkpoint, write_header

AS_NUMPY = {"bf16": np.uint16, "f32": np.float32}


def read_expert(pack, layer, expert):
    info = pack.manifest.experts
    offset = record_offset(layer, expert, info.experts, info.record_bytes)
    with pack.experts_path.open("rb") as file:
        file.seek(offset)
        return decode_expert(info.layout, np.frombuffer(file.read(info.record_bytes), np.uint8))


def dense_values(pack):
    reader = pack.dense()
    values = {}
    for name in reader.names():
        dtype, shape, data = reader.read(name)
        raw = np.frombuffer(data, AS_NUMPY[dtype]).reshape(shape)
        values[name] = codecs.f32_from_bf16(raw) if dtype == "bf16" else raw
    return values


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Every tensor of SMALL, seed 0, by canonical name, as the safetensors library reads them."""
    return load_file(small_checkpoint(tmp_path_factory.mktemp("truth") / "c") / "model.safetensors")


def rounded(values, dtype):
    if dtype == "bf16":
        return codecs.f32_from_bf16(codecs.bf16_from_f32(values))
    return values.astype(np.float16).astype(np.float32) if dtype == "f16" else values


def expert_truth(truth, config, layer, expert):
    at = (
        f"model.layers.{layer}"
        if layer < config.num_hidden_layers
        else f"mtp.layers.{layer - config.num_hidden_layers}"
    )
    gate, up, down = (truth[f"{at}.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return np.concatenate([gate, up]), down


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize(("layout", "shards"), [("per_expert", 1), ("per_expert", 3), ("fused", 1), ("fused", 4)])
def test_every_layout_gives_the_same_values(tmp_path, truth, layout, shards, prefix, dtype):
    small_checkpoint(tmp_path / "c", layout=layout, shards=shards, prefix=prefix, dtype=dtype)
    manifest = convert(tmp_path / "c", tmp_path / "p", experts="f32", dense="f32", threads=2)
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
        assert pack.manifest == manifest
        assert (manifest.experts.layers, manifest.experts.draft_layers) == (5, 1)
        values = dense_values(pack)
        special = {n for n in truth if ".mlp.experts." in n or ".ple_embedding." in n}
        assert set(values) == set(truth) - special
        for name, value in values.items():
            np.testing.assert_array_equal(value, rounded(truth[name], dtype), err_msg=name)
        for layer in range(5):
            for expert in range(SMALL.num_experts):
                for mine, wanted in zip(
                    read_expert(pack, layer, expert), expert_truth(truth, SMALL, layer, expert), strict=True
                ):
                    np.testing.assert_array_equal(mine, rounded(wanted, dtype))
        at = "model.layers.1.ple.ple_embedding.ngram_embedding"
        table = np.concatenate([truth[f"{at}.shard_{k}.weight"] for k in range(4)])
        rows = pack.ngram(1).rows(np.arange(len(table)))
        np.testing.assert_array_equal(rows, rounded(table, dtype))


@pytest.mark.parametrize("experts", ["q4g32", "q4g64"])
def test_four_bit_records_are_what_the_truth_writes(tmp_path, experts):
    config = replace(SMALL, moe_intermediate_size=64)
    small_checkpoint(tmp_path / "c", config)
    truth = load_file(tmp_path / "c" / "model.safetensors")
    convert(tmp_path / "c", tmp_path / "p", experts=experts, threads=2)
    group = int(experts[3:])
    with Pack.open(tmp_path / "p") as pack:
        for layer in (0, 4):
            for mine, weights in zip(read_expert(pack, layer, 2), expert_truth(truth, config, layer, 2), strict=True):
                np.testing.assert_array_equal(mine, codecs.dequantise_q4(*codecs.quantise_q4(weights, group), group))


def test_dense_bf16_rounds_matrices_and_keeps_the_rest(tmp_path, truth):
    small_checkpoint(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "p", experts="f32", dense="bf16")
    with Pack.open(tmp_path / "p") as pack:
        assert pack.manifest.dense_dtype == pack.manifest.ngram[0].dtype == "bf16"
        values = dense_values(pack)
    for name, value in values.items():
        np.testing.assert_array_equal(value, rounded(truth[name], "bf16" if value.ndim == 2 else "f32"), err_msg=name)


def test_dense_file_is_one_the_safetensors_library_reads(tmp_path, truth):
    small_checkpoint(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "p", experts="f32", dense="f32")
    theirs = load_file(tmp_path / "p" / "dense.safetensors")
    np.testing.assert_array_equal(theirs["lm_head.weight"], truth["lm_head.weight"])
    with Pack.open(tmp_path / "p") as pack:
        assert set(pack.dense().names()) == set(theirs)
        first = min(t.offset for t in pack.dense().tensors.values())
    assert first % 64 == 0


def test_dense_views_are_read_only_and_outlive_the_pack(tmp_path):
    small_checkpoint(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "p", experts="f32")
    with Pack.open(tmp_path / "p") as pack:
        _, _, view = pack.dense().read("lm_head.weight")
        with pytest.raises(KeyError):
            pack.dense().read("nothing")
    assert view.readonly
    assert len(bytes(view)) == view.nbytes


def test_two_conversions_give_the_same_pack(tmp_path):
    small_checkpoint(tmp_path / "c", tokenizer=True)
    first = convert(tmp_path / "c", tmp_path / "a", experts="q4g32", threads=1)
    second = convert(tmp_path / "c", tmp_path / "b", experts="q4g32", threads=4)
    assert first == second
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_fingerprint_tells_formats_and_weights_apart(tmp_path):
    small_checkpoint(tmp_path / "c")
    small_checkpoint(tmp_path / "d", seed=1)
    prints = [
        convert(tmp_path / source, tmp_path / f"{source}{experts}{dense}", experts=experts, dense=dense).fingerprint
        for source in "cd"
        for experts in ("f32", "q4g32")
        for dense in ("f32", "bf16")
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, tie_word_embeddings=True),
        replace(SMALL, attention_bias=True),
        replace(SMALL, ple_layer_ids=()),
        replace(SMALL, ple_layer_ids=(1, 2, 3)),
        replace(SMALL, num_experts_per_tok=1, num_experts=1),
        replace(SMALL, layer_types=("full_attention", "indexed_attention", "linear_attention", "full_attention"),
                ple_layer_ids=(3,)),
        replace(SMALL, ple_embed_dim=8192, heads_per_ngram=2, ngram_vocab_size_base=5, split_ngram_parts=3),
    ],
    ids=["tied", "biases", "no n-grams", "three n-gram layers", "one expert", "layer types", "rows above a page"],
)  # fmt: skip
def test_unusual_models_convert(tmp_path, config):
    small_checkpoint(tmp_path / "c", config, mtp=False)
    truth = load_file(tmp_path / "c" / "model.safetensors")
    convert(tmp_path / "c", tmp_path / "p", experts="f32", dense="f32")
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
        assert pack.manifest.experts.draft_layers == 0
        assert pack.manifest.config["tie_word_embeddings"] is config.tie_word_embeddings
        for name, value in dense_values(pack).items():
            np.testing.assert_array_equal(value, truth[name])
        for number, layer in enumerate(sorted(config.ple_layer_ids)):
            at = f"model.layers.{layer - 1}.ple.ple_embedding.ngram_embedding"
            shards = sorted(
                (n for n in truth if n.startswith(at)), key=lambda n: int(n.split("shard_")[1].split(".")[0])
            )
            table = np.concatenate([truth[n] for n in shards])
            np.testing.assert_array_equal(pack.ngram(layer - 1).rows(np.arange(len(table))), table)
            info = pack.ngram(layer - 1).info
            for mine, wanted in zip(
                (info.multipliers, info.head_offsets, info.head_vocab_sizes),
                hash_constants(config, number),
                strict=True,
            ):
                assert list(mine) == wanted.tolist()


def test_absent_constants_are_computed_as_they_were_stored(tmp_path):
    config = replace(SMALL, ple_layer_ids=(1, 3))
    small_checkpoint(tmp_path / "c", config)
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        for layer, table in checkpoint.ngram.items():
            assert checkpoint.text.ngram_constants(layer) == table.constants


def test_constants_of_the_released_model():
    """Known values: vocabulary 248,320, base 20,000,000, seed 1234."""
    config = {
        **TinyConfig(vocab_size=248320, ngram_vocab_size_base=20_000_000, heads_per_ngram=8).text_config(mtp=False),
        "hidden_size": 2560, "ple_embed_dim": 2560,
    }  # fmt: skip
    text = TextConfig.parse(config, ValueError)
    constants = text.ngram_constants(1)
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (constants.head_vocab_sizes[0], constants.head_vocab_sizes[-1]) == (20000003, 20000171)
    assert constants.head_offsets[-1] == 300001275
    assert text.ngram_rows(constants) == 320_001_536
    assert text.ngram_columns == 160
    assert text.ngram_rows(NgramConstants((), (), (128,))) == 128


def test_tied_head_that_is_there_all_the_same_is_kept(tmp_path):
    small_checkpoint(tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", lambda c: c.update(tie_word_embeddings=True))
    manifest = convert(tmp_path / "c", tmp_path / "p", experts="f32")
    assert manifest.config["tie_word_embeddings"] is False
    with Pack.open(tmp_path / "p") as pack:
        assert "lm_head.weight" in pack.dense().names()


def test_carried_files(tmp_path):
    small_checkpoint(tmp_path / "c", tokenizer=True)
    (tmp_path / "c" / "notes.txt").write_text("not carried")
    convert(tmp_path / "c", tmp_path / "p", experts="f32")
    with Pack.open(tmp_path / "p") as pack:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            assert pack.file(name) == (tmp_path / "c" / name).read_bytes()
        assert pack.file("notes.txt") is None
    (tmp_path / "p" / "tokenizer_config.json").write_bytes(
        b"x" * (tmp_path / "p" / "tokenizer_config.json").stat().st_size
    )
    with Pack.open(tmp_path / "p") as pack, pytest.raises(Exception, match="SHA-256"):
        pack.file("tokenizer_config.json")


@pytest.mark.parametrize(
    ("sizes", "experts", "reason"),
    [
        (
            {"moe_intermediate_size": 32},
            "q4g64",
            "intermediate size 32 is not a multiple of q4g64's group of 64; q4g32 fits",
        ),
        (
            {"moe_intermediate_size": 48},
            "q4g32",
            "48 is not a multiple of q4g32's group of 32; no quantised format fits; f32",
        ),
        ({"moe_intermediate_size": 48}, "q4g64", "no quantised format fits"),
        ({"hidden_size": 96, "ple_embed_dim": 96}, "q4g64", "hidden size 96 is not a multiple"),
    ],
)
def test_sizes_that_do_not_fit_name_the_format_that_would(tmp_path, sizes, experts, reason):
    small_checkpoint(tmp_path / "c", replace(SMALL, **sizes))
    with pytest.raises(CheckpointError, match=r"config\.json") as refusal:
        convert(tmp_path / "c", tmp_path / "p", experts=experts)
    assert reason in str(refusal.value)
    assert os.listdir(tmp_path) == ["c"]


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    from shared_experts import floats, quantiser

    monkeypatch.setattr(quantiser, "EXTENSION_SUFFIXES", [".none"])
    quantiser.load_quantiser.cache_clear()
    floats.load_floats.cache_clear()
    small_checkpoint(tmp_path / "c")
    try:
        for experts in ("q4g32", "f32"):
            with pytest.raises(NativeMissing, match=r"install g\+\+ and reinstall"):
                convert(tmp_path / "c", tmp_path / "p", experts=experts)
        assert os.listdir(tmp_path) == ["c"]
    finally:
        quantiser.load_quantiser.cache_clear()


def test_a_large_table_has_a_section_per_part(tmp_path, monkeypatch, truth):
    from shared_experts import manifest as manifests

    monkeypatch.setattr(manifests, "NGRAM_PART_BYTES", 3 * 4096 + 100)
    small_checkpoint(tmp_path / "c")
    made = convert(tmp_path / "c", tmp_path / "p", experts="f32", dense="f32")
    parts = [s for s in made.sections if s.name.startswith("ngram.1.")]
    assert [s.name for s in parts] == [f"ngram.1.{k}" for k in range(len(parts))]
    assert len(parts) > 1
    assert {s.bytes for s in parts[:-1]} == {3 * 4096}
    assert sum(s.bytes for s in parts) == made.ngram[0].table_bytes
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
        at = "model.layers.1.ple.ple_embedding.ngram_embedding"
        table = np.concatenate([truth[f"{at}.shard_{k}.weight"] for k in range(4)])
        np.testing.assert_array_equal(pack.ngram(1).rows(np.arange(len(table))), table)
    monkeypatch.undo()
    with pytest.raises(PackError, match="section 'ngram"):
        Pack.open(tmp_path / "p")


def test_an_empty_file_is_carried(tmp_path):
    small_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "chat_template.jinja").write_bytes(b"")
    convert(tmp_path / "c", tmp_path / "p", experts="f32")
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
        assert pack.file("chat_template.jinja") == b""


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_file_system_that_refuses_direct_reads_gives_the_same_pack(tmp_path, monkeypatch, dtype):
    from shared_experts import safetensors_reader

    small_checkpoint(tmp_path / "c", dtype=dtype)
    wanted = convert(tmp_path / "c", tmp_path / "a", experts="q4g32")
    refused, preadv = [], os.preadv

    def refuse(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(safetensors_reader.os, "preadv", refuse)
    assert convert(tmp_path / "c", tmp_path / "b", experts="q4g32").fingerprint == wanted.fingerprint
    assert refused  # the file system of the test allows them


@pytest.mark.parametrize("spaces", range(1, 9))
def test_tensors_at_any_offset_in_the_file_are_read(tmp_path, spaces):
    small_checkpoint(tmp_path / "c", dtype="bf16")
    wanted = convert(tmp_path / "c", tmp_path / "a", experts="q4g32", threads=1)
    header, data = read_header(tmp_path / "c" / "model.safetensors")
    write_header(tmp_path / "c" / "model.safetensors", json.dumps(header).encode() + b" " * spaces, data)
    assert convert(tmp_path / "c", tmp_path / "b", experts="q4g32", threads=1).fingerprint == wanted.fingerprint
