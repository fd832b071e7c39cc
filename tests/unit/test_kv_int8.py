"""Keys and values as int8: within half a step, in fewer bytes, and nothing of one format is ever read as the other."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lanes.state import int8
from lanes.state.errors import SnapshotRefused
from lanes.state.sequence import AttentionState, SequenceState
from lanes.state.shape import AttentionShape
from lanes.state.snapshot import Header, Identity
from lanes.tolerance import BF16, Tolerance, compare
from tests.fakes.processes import tiny_pack
from tests.fakes.states import SHAPE, read, same
from tests.fakes.talk import Talk, loaded

ROWS = arrays.arrays(np.float32, (2, 3, 8), elements=st.floats(-(2.0**99), 2.0**99, width=32))


@given(ROWS)
@example(np.full((2, 3, 8), 1e-37, np.float32))
@example(np.full((2, 3, 8), 1e-45, np.float32))
def test_a_value_is_off_by_half_a_step_and_codes_stay(values):
    x = torch.from_numpy(values)
    codes, scales = int8.encode(x)
    again = int8.decode(codes, scales, torch.float32)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) <= 127
    assert ((again - x).abs() <= scales * 0.5001 + 1e-37).all()
    assert torch.equal(int8.encode(again)[0], codes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad):
    x = torch.ones(1, 2, 4)
    x[0, 1, 2] = bad
    again = int8.decode(*int8.encode(x), torch.float32)
    assert torch.equal(again[0, 0], x[0, 0])
    assert not again[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_as_they_were_encoded(dtype):
    shape = AttentionShape(2, 8, 3, 4, dtype, int8=True)
    state = AttentionState(shape, lambda size, of: torch.full(size, 99).to(of))
    state.grow(6, 0)
    keys, values = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    state.put(0, 4, keys[:, :4], values[:, :4])
    state.grow(12, 4)
    state.put(4, 6, keys[:, 4:], values[:, 4:])
    for wanted, kept in zip((keys, values), state.read(slice(0, 6)), strict=True):
        assert kept.dtype == dtype
        assert torch.equal(kept, int8.decode(*int8.encode(wanted), dtype))
    chosen = torch.tensor([5, 0, 0, 3])
    for all_rows, some in zip(state.read(slice(0, 6)), state.read(chosen), strict=True):
        assert torch.equal(all_rows[:, chosen], some)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_sizes_are_exact(tokens):
    shape = SHAPE.with_int8()
    state = SequenceState(shape, tokens)
    state.reserve(tokens)
    assert state.nbytes() == shape.bytes(tokens)
    # 2·KV·D values become bytes, and 2·KV scales of four bytes come along
    saved = sum(2 * s.kv_heads * (s.head_dim * (s.dtype.itemsize - 1) - 4) for s in SHAPE.attention.values())
    assert SHAPE.bytes(tokens) - shape.bytes(tokens) == tokens * saved


def test_a_snapshot_of_one_format_is_refused_by_the_other():
    exact, approximate = (Identity.of(b"f" * 32, shape) for shape in (SHAPE, SHAPE.with_int8()))
    assert exact != approximate
    data = Header(exact, b"t" * 16, np.arange(5, dtype=np.uint32), (b"d" * 16,), ()).encode()
    assert Header.decode(data, exact, b"t" * 16, 100)
    with pytest.raises(SnapshotRefused, match="another model"):
        Header.decode(data, approximate, b"t" * 16, 100)


def test_states_are_erased_and_copied_whole():
    a, b = SequenceState(SHAPE.with_int8(), 40), SequenceState(SHAPE.with_int8(), 40)
    for token in range(30):
        read(a, [token])
        read(b, [token])
    assert same(a, b)
    a.erase()
    assert not any(tensor.any() for tensor in a.rows(0, a.allocated_tokens))


def test_a_conversation_goes_on_to_the_bit_and_near_the_exact_one(tmp_path):
    rng = np.random.default_rng(1)
    with loaded(tiny_pack(tmp_path, "f32")) as (model, store):
        text = rng.integers(0, model.spec.vocab, 150).tolist()

        def talk(kept_bytes):
            made = Talk(model, store, kept_bytes=kept_bytes)
            made.states.shape = model.state_shape.with_int8()
            return made

        warm = talk(8 << 20)
        first, _, _ = warm.turn(text, 6)
        before = warm.windows
        prompt = [*text, *first, 5, 6]
        ids, logits, begun = warm.turn(prompt, 6)
        assert begun.cached_tokens > 150
        replayed = talk(0).replay([*before, *warm.windows], 6)
        assert np.array_equal(replayed, logits)
        _, truth, _ = Talk(model, store, kept_bytes=0).turn(prompt, 6, forced=ids)
        assert 0 < compare(logits, truth, Tolerance(BF16, BF16)).offs.max() < BF16
