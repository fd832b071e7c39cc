"""Sizes that lanes on a GPU serve; what they do not know is an error of the start with its name, one past the limit."""

import dataclasses
from unittest.mock import MagicMock

import pytest
from triton.runtime.errors import OutOfResources

from bench.synthetic.shape import SHAPES
from bench.tiny_model import TinyConfig
from lanes import startup_cuda
from lanes.errors import StartError
from lanes.models.qwen4_exp.gpu import served
from lanes.models.qwen4_exp.gpu.served import check_served
from lanes.models.qwen4_exp.spec import Spec
from shared_experts.manifest import ExpertsInfo
from shared_experts.pack import Pack


def info(format: str = "q4g64") -> ExpertsInfo:
    return ExpertsInfo(format, 64, 64, layers=2, draft_layers=0, experts=8, record_bytes=0)


def spec(**sizes: object) -> Spec:
    return dataclasses.replace(Spec.from_config(TinyConfig().text_config(mtp=False)), **sizes)


def test_the_demo_model_and_the_true_shape_are_served():
    with Pack.open("deploy/demo_model/pack") as pack:
        check_served(Spec.from_config(pack.manifest.config), pack.manifest.experts, 32_768)
    for shape in SHAPES.values():
        check_served(Spec.from_config(shape.config.text_config(mtp=True)), info(), 262_144)


@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8", "f32"])
def test_formats(format):
    if format != "f32":
        return check_served(spec(), info(format), 256)
    with pytest.raises(StartError, match="f32"):
        check_served(spec(), info(format), 256)


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("experts", served.MOST_EXPERTS, served.MOST_EXPERTS + 1),
        ("key_dim", served.MOST_HEAD, 2 * served.MOST_HEAD),
        ("value_dim", 1, 3),
        ("value_dim", 64, 48),
        ("head_dim", served.MOST_HEAD, served.MOST_HEAD + 1),
        ("index_dim", served.MOST_HEAD, served.MOST_HEAD + 1),
        ("index_heads", served.MOST_INDEX_HEADS, served.MOST_INDEX_HEADS + 1),
        ("heads", 2 * served.MOST_GROUP, 2 * served.MOST_GROUP + 2),
        ("ngram_dim", 6, 7),
        ("index_budget_tokens", served.MOST_READ_TOKENS, served.MOST_READ_TOKENS + 4),
    ],
)
def test_sizes(name, most, more):
    assert spec().kv_heads == 2
    check_served(spec(**{name: most}), info(), 256)
    with pytest.raises(StartError, match="GPU lanes"):
        check_served(spec(**{name: more}), info(), 256)


def test_a_context_with_more_candidates_than_are_looked_through():
    tokens = 64 * 4096 * 4
    check_served(spec(index_budget_tokens=2048, index_block_tokens=4), info(), tokens)
    with pytest.raises(StartError, match="--context"):
        check_served(spec(index_budget_tokens=2048, index_block_tokens=4), info(), tokens + 4)


def test_a_gpu_whose_multiprocessors_are_too_small():
    with pytest.raises(StartError, match=r"shared memory.*\(196608, 101376 are there\)"), served.on_this_gpu():
        raise OutOfResources(196_608, 101_376, "shared memory")


@pytest.mark.parametrize("where", ["_layer_pace", "_share"])
def test_whichever_kernel_is_too_large_it_is_an_error_of_the_start(where, monkeypatch):
    """Those of routed experts run before any window exists."""

    def too_large(*given: object) -> None:
        raise OutOfResources(300, 200, "registers")

    for name in ("cuda", "PinnedRegion", "Spec", "check_served", "size_for", "quiet", "divide", "DeviceSlots"):
        monkeypatch.setattr(startup_cuda, name, MagicMock())
    for name in ("ExpertCache", "GpuExperts", "_layer_pace", "_share"):
        monkeypatch.setattr(startup_cuda, name, MagicMock())
    startup_cuda.PinnedRegion.return_value.mode = "mapped"
    startup_cuda.divide.return_value = MagicMock(), MagicMock()
    opened = MagicMock()
    opened.stack.enter_context = lambda manager: manager
    opened.pack.manifest.dense_dtype = "bf16"
    monkeypatch.setattr(startup_cuda, where, too_large)
    with pytest.raises(StartError, match=r"more registers than this GPU has \(300, 200 are there\)"):
        startup_cuda.cuda_parts(opened)
