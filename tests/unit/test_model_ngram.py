"""N-gram row ids against the definition, one token at a time, with end-of-sequence ids anywhere."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.tiny_model import TinyConfig, hash_constants
from lanes.models.qwen4_exp.ngram import row_ids

torch.set_num_threads(1)  # test workers share the cores

EOS = 3


def table(order: int, heads: int) -> SimpleNamespace:
    config = TinyConfig(vocab_size=9, ngram_size=order, heads_per_ngram=heads, ngram_vocab_size_base=50)
    multipliers, offsets, sizes = (torch.from_numpy(x) for x in hash_constants(config, 1))
    return SimpleNamespace(multipliers=multipliers, offsets=offsets, sizes=sizes)


def naive(ids: list[int], t: int, hashes: SimpleNamespace, order: int, heads: int) -> list[int]:
    rows: list[int] = []
    for n in range(2, order + 1):
        mixed = 0
        for back in range(n):
            before = [ids[t - i] if t >= i else EOS for i in range(1, back + 1)]
            seen = ids[t] if back == 0 else EOS if EOS in before else before[-1]
            mixed ^= seen * int(hashes.multipliers[back])
        first = (n - 2) * heads
        rows += [mixed % int(hashes.sizes[h]) + int(hashes.offsets[h]) for h in range(first, first + heads)]
    return rows


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.integers(2, 5), st.integers(1, 3))
def test_row_ids(ids, order, heads):
    hashes = table(order, heads)
    history = torch.tensor([EOS] * (order - 1) + ids)
    expected = [naive(ids, t, hashes, order, heads) for t in range(len(ids))]
    assert row_ids(history, EOS, hashes, heads).tolist() == expected
    for cut in range(1, len(ids)):  # the last order - 1 ids are all that must be remembered
        assert row_ids(history[cut:], EOS, hashes, heads).tolist() == expected[cut:]


def test_every_head_stays_in_its_own_rows():
    hashes = table(3, 2)
    ids = row_ids(torch.randint(0, 9, (500,)), EOS, hashes, 2)
    assert (ids >= hashes.offsets).all()
    assert (ids < hashes.offsets + hashes.sizes).all()


@pytest.mark.parametrize("vocab", [2, 512, 1 << 21])
def test_products_never_overflow(vocab):
    multipliers, _, _ = hash_constants(TinyConfig(vocab_size=vocab), 0)
    assert all(0 < int(m) * (vocab - 1) < 1 << 63 for m in multipliers)
