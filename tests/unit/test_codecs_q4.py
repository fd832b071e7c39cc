"""The 4-bit code: its numpy truth against its definition, and the native twin against the truth, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared_experts import codecs
from shared_experts.codecs import dequantise_q4, pack_nibbles, quantise_q4, unpack_nibbles
from shared_experts.quantiser import ISAS, load_quantiser

GROUPS = (32, 64)
NATIVE = load_quantiser()


def relative_error(x, group):
    codes, scales = NATIVE.quantise(x, group)
    return float(np.sqrt(((dequantise_q4(codes, scales, group) - x) ** 2).sum() / (x**2).sum()))


def assert_equal(x, group):
    codes, scales = quantise_q4(x, group)
    for isa in NATIVE.isas:
        for threads in (1, 3):
            native_codes, native_scales = NATIVE.quantise(x, group, threads=threads, isa=isa)
            np.testing.assert_array_equal(native_scales.view(np.uint16), scales.view(np.uint16), err_msg=isa)
            np.testing.assert_array_equal(native_codes, codes, err_msg=isa)


@pytest.mark.parametrize(("group", "figure"), [(32, 0.0813), (64, 0.0901)])
def test_error_on_gaussian_weights_is_as_measured(group, figure):
    x = np.random.default_rng(0).standard_normal((1024, 1280), np.float32)
    assert relative_error(x, group) == pytest.approx(figure, rel=0.01)


@pytest.mark.parametrize(("group", "figure"), [(32, 0.1029), (64, 0.1216)])
def test_error_on_heavy_tails_is_as_measured(group, figure):
    x = np.random.default_rng(0).standard_t(5, (1024, 1280)).astype(np.float32)
    assert relative_error(x, group) == pytest.approx(figure, rel=0.03)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_native_equals_truth_on_gaussian_shapes(group, rows, count):
    x = np.random.default_rng(rows * 100 + count).standard_normal((rows, count * group), np.float32)
    assert_equal(x, group)


def hard_cases(group):
    random = np.random.default_rng(group)
    gauss = random.standard_normal((64, 8 * group)).astype(np.float32)
    spread = np.float32(10) ** np.repeat(random.integers(-42, 4, (64, 8)), group, axis=1).astype(np.float32)
    return {
        "small integers, many ties": random.integers(-3, 4, gauss.shape).astype(np.float32),
        "halves of a step": random.integers(-16, 17, gauss.shape).astype(np.float32) / 2,
        "every magnitude in one group": (gauss * 10.0 ** random.integers(-12, 4, gauss.shape)).astype(np.float32),
        "every magnitude, by group": (gauss * spread).astype(np.float32),
        "subnormal": (gauss * np.float32(1e-40)).astype(np.float32),
        "scales below the least normal half": (gauss * np.float32(3e-5)).astype(np.float32),
        "zeros": np.zeros_like(gauss),
        "one value per group": np.where(np.arange(8 * group) % group == 5, gauss, 0).astype(np.float32),
        "constant": np.full_like(gauss, 0.37),
        "plus and minus one value": np.where(gauss > 0, np.float32(2.5), np.float32(-2.5)),
        "at the limit": np.clip(gauss * 40000, -codecs.LARGEST_WEIGHT, codecs.LARGEST_WEIGHT).astype(np.float32),
        "negative zeros": np.where(gauss > 0, np.float32(-0.0), gauss),
    }


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", hard_cases(32))
def test_native_equals_truth_on_hard_cases(group, case):
    assert_equal(hard_cases(group)[case], group)


@settings(max_examples=60)
@given(
    st.sampled_from(GROUPS).flatmap(
        lambda g: st.tuples(
            st.just(g),
            hnp.arrays(np.float32, (3, g), elements=st.floats(-65504, 65504, width=32, allow_nan=False)),
        )
    )
)
def test_native_equals_truth_on_any_weights(case):
    group, x = case
    assert_equal(x, group)


@pytest.mark.parametrize("group", GROUPS)
def test_no_candidate_of_the_definition_is_better(group):
    """The chosen (scale, codes) reach the least error of all candidates, computed plainly in float64."""
    x = np.random.default_rng(3).standard_normal((20, group), np.float32)
    codes, scales = quantise_q4(x, group)
    chosen = ((dequantise_q4(codes, scales, group).astype(np.float64) - x) ** 2).sum(1)
    for sign in (1, -1):
        for k in range(16):
            s = (sign * np.abs(x).max(1) * (42 + 2 * k) / 512).astype(np.float16).astype(np.float64)[:, None]
            error = ((np.clip(np.rint(x / s), -8, 7) * s - x) ** 2).sum(1)
            assert (chosen <= error * (1 + 1e-5)).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65536.0, -1e30])
def test_weights_that_no_code_stands_for_are_refused(group, bad):
    x = np.ones((3, 2 * group), np.float32)
    x[1, group + 7] = bad
    with pytest.raises(ValueError, match="not finite or beyond 65504"):
        quantise_q4(x, group)
    for isa in NATIVE.isas:
        with pytest.raises(ValueError, match=f"row 1, columns {group}..{2 * group - 1}"):
            NATIVE.quantise(x, group, isa=isa)


@pytest.mark.parametrize("shape", [(4, 48), (4, 0 + 31), (2, 100)])
def test_columns_that_do_not_fit_are_refused(shape):
    x = np.zeros(shape, np.float32)
    for quantise in (quantise_q4, NATIVE.quantise):
        with pytest.raises(ValueError, match="not a multiple"):
            quantise(x, 32)


@pytest.mark.parametrize("group", GROUPS)
def test_zero_groups_have_scale_zero_and_code_eight(group):
    codes, scales = NATIVE.quantise(np.zeros((2, group), np.float32), group)
    assert (scales == 0).all()
    assert (codes == 0x88).all()
    assert (dequantise_q4(codes, scales, group) == 0).all()


@pytest.mark.parametrize("group", GROUPS)
def test_nibbles_lie_in_split_halves(group):
    codes = np.arange(2 * group, dtype=np.uint8).reshape(1, -1) % 16
    packed = pack_nibbles(codes, group)
    assert packed.shape == (1, group)
    for g in range(2):
        for j in range(group // 2):
            byte = packed[0, g * group // 2 + j]
            assert byte & 15 == codes[0, g * group + j]
            assert byte >> 4 == codes[0, g * group + j + group // 2]
    np.testing.assert_array_equal(unpack_nibbles(packed, group), codes)


def test_bf16_rounds_to_nearest_even_and_back():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, 3e-41], np.float32)
    back = codecs.f32_from_bf16(codecs.bf16_from_f32(values))
    np.testing.assert_array_equal(back[:4], np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7], np.float32))
    assert np.signbit(back[4])
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(codecs.bf16_from_f32(codecs.f32_from_bf16(finite)), finite)


def test_bf16_overflow_is_refused_at_the_limit():
    just_below = np.array([0x7F7F7FFF], np.uint32).view(np.float32)
    assert codecs.bf16_from_f32(just_below)[0] == 0x7F7F
    with pytest.raises(ValueError, match="too large for bf16"):
        codecs.bf16_from_f32(np.array([0x7F7F8000], np.uint32).view(np.float32))


def test_instruction_sets_are_named_in_order():
    assert ISAS[: len(NATIVE.isas)] == NATIVE.isas
    assert NATIVE.isas[0] == "scalar"
