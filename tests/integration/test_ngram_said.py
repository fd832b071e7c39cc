"""What a decode window of a GPU lane is told of its n-gram layers: the layers' own rows and counts, by native calls."""

import itertools
import os

import numpy as np
import pytest
import torch

from bench.gpu_lane_rig import small_pack
from bench.tiny_model import TinyConfig
from lanes.counters import Counters
from lanes.errors import NativeKernelUnavailable, TableReadFailed
from lanes.models import load_model
from lanes.models.qwen4_exp import row_ids
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.gpu.saying import Saying
from tests.fakes.reference_model import naive_experts

SIZES = TinyConfig(ple_layer_ids=(2, 3), num_hidden_layers=4, moe_intermediate_size=64, num_experts=8)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    torch.set_num_threads(1)
    with small_pack(tmp_path_factory.mktemp("said"), SIZES) as pack:
        yield pack


class Told:
    """A model, what it says, and its counters."""

    def __init__(self, pack, cache_bytes: int) -> None:
        self.counters = Counters()
        self.model = load_model(pack, naive_experts(pack), ngram_cache_bytes=cache_bytes, counters=self.counters)
        self.said = Inputs.of(self.model.spec, "cpu")
        self.saying = Saying(self.said, self.model)
        self.rows = self.said.ngram.numpy()

    def counts(self) -> tuple[int, ...]:
        self.saying.count()
        counters = self.counters
        return (
            counters.ngram_rows, counters.ngram_cache_hits, counters.ngram_prefetch_hits, counters.ngram_read_bytes,
        )  # fmt: skip


def windows(model):
    """(context, tokens) as answers have them, some of them often, with ends of sequences among them."""
    random = np.random.default_rng(1)
    some = random.integers(0, model.spec.vocab, 12)
    some[::4] = model.spec.ngram_reset
    for rows in itertools.islice(itertools.cycle((1, 1, 4, 2, 1, 3)), 60):
        ids = random.choice(some, model.state_shape.context_ids + rows)
        yield ids[:-rows], ids[-rows:]


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("native", [True, False], ids=["native", "arrays"])
def test_rows_and_counts_are_the_layers_own(pack, monkeypatch, refuse_direct, mode, cache_bytes, native):
    if mode == "buffered":
        refuse_direct()
    if not native:

        def missing():
            raise NativeKernelUnavailable("not built")

        monkeypatch.setattr(row_ids, "_call", missing)
    told, twin = Told(pack, cache_bytes), Told(pack, cache_bytes)
    assert len(told.model.ngrams) == 2
    readers = pack._readers[-4:]
    assert {reader.mode for reader in readers} <= ({"buffered"} if mode == "buffered" else {"direct", "buffered"})
    assert all((say is not None) == native for _, say, _ in told.saying._layers)
    for context, ids in windows(told.model):
        told.rows.fill(np.nan)
        told.saying.ngrams(context, ids)
        for number, layer in enumerate(twin.model.ngrams):
            want = layer.rows_of(np.concatenate((context, ids)))
            assert told.rows[number, : len(ids)].tobytes() == want.tobytes()
        assert np.isnan(told.rows[:, len(ids) :]).all()
        assert told.counts() == twin.counts()
    assert told.counters.ngram_cache_hits > 0
    told.saying.count()
    assert told.counts() == twin.counts(), "nothing is counted twice"


def test_a_table_that_cannot_be_read_is_the_layers_own_error(tmp_path):
    with small_pack(tmp_path, SIZES) as pack:
        told = Told(pack, 1 << 20)
        context, ids = next(windows(told.model))
        os.truncate(pack.path / "ngram.bin", 0)
        with pytest.raises(TableReadFailed, match="layer 1 cannot be read"):
            told.saying.ngrams(context, ids)


def test_tokens_are_erased(pack):
    told = Told(pack, 1 << 20)
    told.saying.ngrams(np.array([5, 6]), np.array([7, 8, 9, 10]))
    kept = [told.saying._tokens, *(layer._named for layer in told.model.ngrams)]
    assert all(array.any() for array in kept)
    told.saying.erase()
    for layer in told.model.ngrams:
        layer.erase()
    assert not any(array.any() for array in kept)
