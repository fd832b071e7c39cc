"""The cases of bench.gpu_kernels in the interpreter, at small sizes: its checks pass, and can fail."""

import pytest
import torch
import triton

from bench import gpu_cases
from bench.gpu_attention import attention_cases
from bench.gpu_cases import ExpertLayer, Records, Sizes
from bench.gpu_products import projection_products, shared_products, stream_products
from lanes.kernels import combine, experts, sampling

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="compiled here: bench/gpu_kernels.py")

SMALL = Sizes(
    layers=2, hidden=64, inner=64, experts=24, chosen=4, streams=2, lowrank=8, key_heads=1, value_heads=2, delta_dim=16,
    heads=2, head_dim=32, rotated=16, vocabulary=300, attention_layers=1, kv_heads=1, index_heads=2, index_dim=16,
    blocks_chosen=3, contexts=(8, 40),
)  # fmt: skip


@pytest.fixture
def few_programs(monkeypatch):
    for module, name in ((combine, "COLUMNS"), (sampling, "BLOCK")):
        monkeypatch.setattr(module, name, 64)
    for name in ("GATE_TILE", "DOWN_TILE"):
        monkeypatch.setattr(experts, name, (64, 4))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_dense_cases(few_programs, rows):
    torch.manual_seed(0)
    for case in gpu_cases.dense_cases(SMALL, rows, "cpu"):
        case.layer(1)
        if case.check is not None:
            case.check()


@pytest.mark.parametrize("group", [stream_products, projection_products, shared_products])
def test_the_product_cases(few_programs, group):
    torch.manual_seed(0)
    for case in group(SMALL, 2, "cpu"):
        case.layer(1)
        if case.check is not None:
            case.check()


def test_the_attention_cases():
    torch.manual_seed(0)
    for case in attention_cases(SMALL, 2, "cpu"):
        case.layer(0)
        if case.check is not None:
            case.check()


def test_the_expert_cases(few_programs, monkeypatch):
    torch.manual_seed(0)
    records = Records(SMALL, 2, "cpu")
    layer = ExpertLayer(SMALL, records, 2, "cpu")
    layer.check()
    expert, pairs = records.jobs(1, 2, SMALL.chosen)
    assert ((pairs >= 0).sum(1) == 2).sum() == gpu_cases.SHARED_BY_ROWS
    place = (int(records.tables[1, expert[0]]) - records.bytes.data_ptr()) // records.layout.record_bytes
    down = experts.down

    def with_a_wrong_code(*arguments):
        records.bytes[place, records.layout.down_codes] ^= 0x08
        down(*arguments)
        records.bytes[place, records.layout.down_codes] ^= 0x08

    monkeypatch.setattr(experts, "down", with_a_wrong_code)
    with pytest.raises(AssertionError, match="bits of y"):
        layer.check()
