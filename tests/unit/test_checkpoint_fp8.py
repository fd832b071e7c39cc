"""FP8 checkpoints: a value is code times scale in one fp32 product; what cannot be read so is refused by name."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shared_experts import codecs
from shared_experts.checkpoint import Checkpoint, canonical
from shared_experts.convert import convert
from shared_experts.errors import CheckpointError
from shared_experts.pack import Pack
from tests.fakes.checkpoints import SMALL, edit_json, read_header, small_checkpoint, write_header
from tests.unit.test_convert import dense_values, expert_truth, read_expert

# blocks: whole ones, partial ones at both edges, and matrices of more than one block
WIDE = replace(
    SMALL, hidden_size=192, moe_intermediate_size=160, shared_expert_intermediate_size=32, head_dim=64, ple_embed_dim=64
)
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
FILE = "model.safetensors"


def torch_values(path):
    """Every tensor in fp32 by canonical name, dequantised by torch, block after block."""
    raw = load_file(path / FILE)
    values = {}
    for name, tensor in raw.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            scale = raw.get(name + "_scale_inv", raw.get(f"{TABLE}.weight_scale_inv")).float()
            if scale.numel() == 1:
                value = value * scale.reshape(())
            else:
                for row in range(scale.shape[-2]):
                    for column in range(scale.shape[-1]):
                        rows, columns = (slice(128 * i, 128 * i + 128) for i in (row, column))
                        value[..., rows, columns] *= scale[..., row, column, None, None]
        values[canonical(name)] = value.numpy()
    return values


def table_of(values):
    if f"{TABLE}.weight" in values:
        return values[f"{TABLE}.weight"]
    return np.concatenate([values[f"{TABLE}.shard_{k}.weight"] for k in range(4)])


def assert_exact(source, target, config=WIDE):
    convert(source, target, experts="f32", dense="f32", threads=2)
    truth = torch_values(source)
    with Pack.open(target) as pack:
        pack.verify()
        assert "quantization_config" not in pack.manifest.config
        for name, value in dense_values(pack).items():
            np.testing.assert_array_equal(value.view(np.uint32), truth[name].view(np.uint32), err_msg=name)
        for layer in range(5):
            for expert in range(config.num_experts):
                for mine, wanted in zip(
                    read_expert(pack, layer, expert), expert_truth(truth, config, layer, expert), strict=True
                ):
                    np.testing.assert_array_equal(mine, wanted)
        table = table_of(truth)
        np.testing.assert_array_equal(pack.ngram(1).rows(np.arange(len(table))), table)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_every_value_is_exactly_code_times_scale(tmp_path, prefix):
    source = small_checkpoint(tmp_path / "c", WIDE, dtype="fp8", prefix=prefix)
    kinds = {t.dtype for n, t in load_file(source / FILE).items() if not n.endswith("_scale_inv")}
    assert torch.float8_e4m3fn in kinds
    scales = {n: t for n, t in load_file(source / FILE).items() if n.endswith("_scale_inv")}
    assert {tuple(t.shape) for t in scales.values()} >= {(2, 2), (), (1, 2), (2, 1)}
    assert {t.dtype for t in scales.values()} == {torch.float32, torch.bfloat16}
    assert_exact(source, tmp_path / "p")


def test_fused_experts_have_a_grid_each(tmp_path):
    fused = small_checkpoint(tmp_path / "fused", WIDE, dtype="fp8", layout="fused")
    small_checkpoint(tmp_path / "each", WIDE, dtype="fp8")
    raw = load_file(fused / FILE)
    assert raw["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 3, 2)
    truth = torch_values(fused)
    convert(fused, tmp_path / "p", experts="f32", dense="f32")
    with Pack.open(tmp_path / "p") as pack:
        for expert in range(4):
            gate_up, down = read_expert(pack, 2, expert)
            np.testing.assert_array_equal(gate_up, truth["model.layers.2.mlp.experts.gate_up_proj"][expert])
            np.testing.assert_array_equal(down, truth["model.layers.2.mlp.experts.down_proj"][expert])


def test_every_code_reads_as_torch_says(tmp_path):
    """All 254 numbers in one tensor, and the two that are none refused."""
    source = small_checkpoint(tmp_path / "c", WIDE, dtype="fp8")
    name = "model.layers.3.self_attn.q_proj.weight"
    header, data = read_header(source / FILE)
    begin, end = header[name]["data_offsets"]
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    spoilt = bytearray(data)
    spoilt[begin:end] = np.resize(codes, end - begin).tobytes()
    write_header(source / FILE, header, bytes(spoilt))
    assert_exact(source, tmp_path / "p")
    for code in (0x7F, 0xFF):
        spoilt[begin + 777] = code
        write_header(source / FILE, header, bytes(spoilt))
        with pytest.raises(CheckpointError, match="element 777 is not a number") as refusal:
            convert(source, tmp_path / "q", experts="f32")
        assert refusal.value.tensor == name


def test_bf16_rows_and_quantised_experts_round_the_exact_value(tmp_path):
    config = replace(WIDE, moe_intermediate_size=64)
    source = small_checkpoint(tmp_path / "c", config, dtype="fp8")
    truth = torch_values(source)
    convert(source, tmp_path / "p", experts="q8")
    with Pack.open(tmp_path / "p") as pack:
        table = codecs.f32_from_bf16(codecs.bf16_from_f32(table_of(truth)))
        np.testing.assert_array_equal(pack.ngram(1).rows(np.arange(len(table))), table)
        for mine, weights in zip(read_expert(pack, 0, 1), expert_truth(truth, config, 0, 1), strict=True):
            np.testing.assert_array_equal(mine, codecs.dequantise_q8(*codecs.quantise_q8(weights)))


def rewrite(source, change):
    """Changes tensors: a map of name to (dtype, shape, bytes), edited in place."""
    header, data = read_header(source / FILE)
    tensors = {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    change(tensors)
    entries, blob = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(content)]}
        blob += content
    write_header(source / FILE, entries, blob)


def shard_scales(*shape):
    def change(tensors):
        for k in range(4):
            name = f"{TABLE}.shard_{k}.weight_scale_inv"
            dtype, _, content = tensors[name]
            tensors[name] = (dtype, list(shape), content)

    return change


def one_scale(tensors):
    for k in range(4):
        scale = tensors.pop(f"{TABLE}.shard_{k}.weight_scale_inv")
    tensors[f"{TABLE}.weight_scale_inv"] = scale


def blocks(tensors):
    for k in range(4):
        rows, columns = tensors[f"{TABLE}.shard_{k}.weight"][1]
        grid = [-(-rows // 128), -(-columns // 128)]
        scales = np.linspace(0.01, 0.3, grid[0] * grid[1], dtype="<f4")
        tensors[f"{TABLE}.shard_{k}.weight_scale_inv"] = ("F32", grid, scales.tobytes())


def shards_without_scales_but_one(tensors):
    one_scale(tensors)
    tensors[f"{TABLE}.shard_2.weight_scale_inv"] = ("F32", [], np.float32(0.25).tobytes())


@pytest.mark.parametrize(
    "change", [shard_scales(1), shard_scales(1, 1), one_scale, blocks, shards_without_scales_but_one]
)
def test_forms_of_the_scale_of_an_ngram_table(tmp_path, change):
    source = small_checkpoint(tmp_path / "c", WIDE, dtype="fp8")
    rewrite(source, change)
    assert_exact(source, tmp_path / "p")


def test_a_whole_table_with_one_scale(tmp_path):
    source = small_checkpoint(tmp_path / "c", WIDE, dtype="fp8", layout="fused")
    truth = torch_values(source)
    convert(source, tmp_path / "p", experts="f32", dense="f32")
    with Pack.open(tmp_path / "p") as pack:
        np.testing.assert_array_equal(pack.ngram(1).rows(np.arange(100)), table_of(truth)[:100])


EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"
SCALE = EXPERT + "_scale_inv"
MATRIX = "model.layers.0.linear_attn.out_proj.weight"


def setting(name, dtype, shape, content):
    return lambda tensors: tensors.update({name: (dtype, shape, content)})


def scale_of(name, value):
    def change(tensors):
        dtype, shape, content = tensors[name]
        values = np.frombuffer(content, "<f4").copy()
        values[-1] = value
        tensors[name] = (dtype, shape, values.tobytes())

    return change


F4 = np.float32(1).tobytes()
REFUSED = {
    "no scale": (lambda t: t.pop(SCALE), EXPERT, "its weight_scale_inv is missing"),
    "scale of another shape": (setting(SCALE, "F32", [4], F4 * 4), SCALE, "blocks of 128 x 128 need [2, 2]"),
    "scale transposed": (setting(MATRIX + "_scale_inv", "F32", [1, 2], F4 * 2), MATRIX + "_scale_inv", "need [2, 1]"),
    "a scalar for a matrix": (setting(SCALE, "F32", [], F4), SCALE, "has shape []"),
    "scale in F16": (setting(SCALE, "F16", [2, 2], F4 * 2), SCALE, "has dtype F16, wanted F32 or BF16"),
    "scale in I64": (setting(SCALE, "I64", [2, 2], F4 * 8), SCALE, "has dtype I64"),
    "scale zero": (scale_of(SCALE, 0), SCALE, "not positive"),
    "scale negative": (scale_of(SCALE, -1), SCALE, "not positive"),
    "scale infinite": (scale_of(SCALE, np.inf), SCALE, "is not finite"),
    "scale NaN": (scale_of(SCALE, np.nan), SCALE, "is not finite"),
    "scale too large": (scale_of(SCALE, 1e37), SCALE, "values become infinite"),
    "scale of a bf16 tensor": (
        setting("model.embed_tokens.weight_scale_inv", "F32", [3, 2], F4 * 6),
        "model.embed_tokens.weight_scale_inv", "is no scale of an F8_E4M3 tensor",
    ),
    "scale of nothing": (setting("model.foo_scale_inv", "F32", [1], F4), "model.foo_scale_inv", "is no scale"),
    "table scale of three": (
        setting(f"{TABLE}.shard_0.weight_scale_inv", "F32", [3], F4 * 3),
        f"{TABLE}.shard_0.weight_scale_inv", "has shape [3]",
    ),
    "table scale missing": (
        lambda t: t.pop(f"{TABLE}.shard_3.weight_scale_inv"), f"{TABLE}.shard_3.weight", "weight_scale_inv is missing",
    ),
    "table scale twice": (
        setting(f"{TABLE}.weight_scale_inv", "F32", [], F4), f"{TABLE}.weight_scale_inv", "is no scale",
    ),
    "a vector in FP8": (
        setting("model.layers.0.linear_attn.dt_bias", "F8_E4M3", [4], b"\x01" * 4),
        "model.layers.0.linear_attn.dt_bias", "only matrices have scales",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("fp8") / "c", WIDE, dtype="fp8")


@pytest.mark.parametrize("case", REFUSED)
def test_odd_scales_are_refused_by_name(good, tmp_path, case):
    import shutil

    change, tensor, words = REFUSED[case]
    source = shutil.copytree(good, tmp_path / "c")
    rewrite(source, change)
    with pytest.raises(CheckpointError, match=re.escape(words)) as refusal:
        convert(source, tmp_path / "p", experts="f32")
    assert refusal.value.tensor == tensor
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("quantization_config"), "has no quantization_config"),
        (lambda c: c["quantization_config"].update(quant_method="gptq"), "quant_method 'gptq' is not read"),
        (lambda c: c["quantization_config"].update(fmt="e5m2"), "fmt 'e5m2' is not read"),
        (lambda c: c["quantization_config"].update(weight_block_size=[64, 128]), "weight_block_size [64, 128] is not"),
        (lambda c: c["quantization_config"].update(weight_block_size=128), "weight_block_size must be a list"),
        (lambda c: c["quantization_config"].pop("weight_block_size"), "weight_block_size"),
        (lambda c: c.update(quantization_config=[1]), "quantization_config"),
        (lambda c: c.update(quantization_config="fp8"), "quantization_config"),
    ],
)
def test_the_description_in_the_config_is_checked(good, tmp_path, change, words):
    import shutil

    source = shutil.copytree(good, tmp_path / "c")
    edit_json(source / "config.json", change)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Checkpoint.open(source)


def test_a_quantised_checkpoint_of_another_kind_is_refused_even_without_fp8_tensors(tmp_path):
    source = small_checkpoint(tmp_path / "c")
    edit_json(source / "config.json", lambda c: c.update(quantization_config={"quant_method": "awq"}))
    with pytest.raises(CheckpointError, match="'awq' is not read; known: fp8"):
        Checkpoint.open(source)
