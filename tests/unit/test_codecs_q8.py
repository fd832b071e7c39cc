"""The 8-bit code: its numpy truth against its definition, and the native twin against the truth, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared_experts.codecs import LARGEST_WEIGHT, dequantise_q8, quantise_q8
from shared_experts.expert_record import decode_expert, encode_expert
from shared_experts.layout import Q8, RecordLayout
from shared_experts.quantiser import load_quantiser

NATIVE = load_quantiser()
GROUP = 64


def assert_equal(x):
    codes, scales = quantise_q8(x)
    for isa in NATIVE.isas:
        for threads in (1, 3):
            native_codes, native_scales = NATIVE.quantise_q8(x, threads=threads, isa=isa)
            np.testing.assert_array_equal(native_scales.view(np.uint16), scales.view(np.uint16), err_msg=isa)
            np.testing.assert_array_equal(native_codes, codes, err_msg=isa)


def hard_cases():
    random = np.random.default_rng(8)
    gauss = random.standard_normal((64, 8 * GROUP)).astype(np.float32)
    spread = np.float32(10) ** np.repeat(random.integers(-42, 4, (64, 8)), GROUP, axis=1).astype(np.float32)
    return {
        "gauss": gauss,
        "integers to 127, many exact": random.integers(-127, 128, gauss.shape).astype(np.float32),
        "halves of a step": random.integers(-255, 256, gauss.shape).astype(np.float32) / 2,
        "every magnitude in one group": (gauss * 10.0 ** random.integers(-12, 4, gauss.shape)).astype(np.float32),
        "every magnitude, by group": (gauss * spread).astype(np.float32),
        "subnormal": (gauss * np.float32(1e-40)).astype(np.float32),
        "scales below the least normal half": (gauss * np.float32(3e-3)).astype(np.float32),
        "scales of a few steps": (gauss * np.float32(1e-5)).astype(np.float32),
        "zeros": np.zeros_like(gauss),
        "one value per group": np.where(np.arange(8 * GROUP) % GROUP == 5, gauss, 0).astype(np.float32),
        "at the limit": np.clip(gauss * 40000, -LARGEST_WEIGHT, LARGEST_WEIGHT).astype(np.float32),
        "negative zeros": np.where(gauss > 0, np.float32(-0.0), gauss),
    }


@pytest.mark.parametrize("case", hard_cases())
def test_native_equals_truth_and_no_value_is_more_than_half_a_step_off(case):
    x = hard_cases()[case]
    assert_equal(x)
    codes, scales = quantise_q8(x)
    assert np.abs(codes.astype(int)).max() <= 127
    step = np.repeat(scales.astype(np.float64), GROUP, axis=1)
    assert (np.abs(dequantise_q8(codes, scales) - x.astype(np.float64)) <= step / 2 * (1 + 1e-6)).all()
    assert ((scales == 0) == (np.abs(x).reshape(64, 8, GROUP).max(2) == 0)).all()


@settings(max_examples=60)
@given(hnp.arrays(np.float32, (3, GROUP), elements=st.floats(-65504, 65504, width=32, allow_nan=False)))
def test_native_equals_truth_on_any_weights(x):
    assert_equal(x)


def test_the_scale_is_the_nearest_half_unless_that_is_too_small():
    peaks = np.array([127.0, 1.0, 0.001, 2**-24 * 127 * 1.49, 2**-24 * 127 * 0.3, 1e-44, 0.0, 65504.0], np.float32)
    x = np.zeros((len(peaks), GROUP), np.float32)
    x[:, 3] = -peaks
    codes, scales = quantise_q8(x)
    for peak, scale, code in zip(peaks.astype(float), scales[:, 0], codes[:, 3], strict=True):
        nearest = np.float16(np.float32(peak) / np.float32(127))
        assert scale == nearest or (nearest * 127.5 < peak and scale == np.nextafter(nearest, np.float16(np.inf)))
        assert code == (0 if peak < 2**-25 else -min(127, round(peak / float(scale))))
    assert scales[0, 0] == 1
    assert scales[6, 0] == 0


def test_error_on_gaussian_weights_is_as_measured():
    x = np.random.default_rng(0).standard_normal((1024, 1280), np.float32)
    codes, scales = NATIVE.quantise_q8(x)
    error = float(np.sqrt(((dequantise_q8(codes, scales) - x) ** 2).sum() / (x**2).sum()))
    assert error == pytest.approx(0.00593, rel=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65536.0, -1e30])
def test_weights_that_no_code_stands_for_are_refused(bad):
    x = np.ones((3, 2 * GROUP), np.float32)
    x[1, GROUP + 7] = bad
    with pytest.raises(ValueError, match="not finite or beyond 65504"):
        quantise_q8(x)
    for isa in NATIVE.isas:
        with pytest.raises(ValueError, match=r"row 1, columns 64\.\.127"):
            NATIVE.quantise_q8(x, isa=isa)


@pytest.mark.parametrize(("columns", "group"), [(96, 64), (31, 64), (64, 32)])
def test_sizes_that_do_not_fit_are_refused(columns, group):
    for quantise in (quantise_q8, NATIVE.quantise_q8):
        with pytest.raises(ValueError, match="not a multiple"):
            quantise(np.zeros((4, columns), np.float32), group)


def test_a_record_holds_codes_in_plain_order_and_its_scales():
    layout = RecordLayout.of(Q8, 128, 64)
    random = np.random.default_rng(1)
    gate_up = random.standard_normal((128, 128), np.float32)
    down = random.standard_normal((128, 64), np.float32)
    record = encode_expert(layout, gate_up, down, NATIVE.of(Q8))
    codes, scales = quantise_q8(gate_up)
    np.testing.assert_array_equal(record[: codes.size].view(np.int8).reshape(codes.shape), codes)
    at = layout.gate_up_scales
    np.testing.assert_array_equal(record[at : at + 2 * scales.size].view("<f2").reshape(scales.shape), scales)
    for mine, weights in zip(decode_expert(layout, record), (gate_up, down), strict=True):
        np.testing.assert_array_equal(mine, dequantise_q8(*quantise_q8(weights)))
    assert (layout.down_codes, layout.gate_up_scales) == (128 * 128, 128 * 128 + 128 * 64)
    assert (layout.down_scales, layout.record_bytes) == (24576 + 512, 28672)
