"""The numpy reference is right by means that share nothing with it: exact fractions, math.exp, dense products."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lanes.experts import reference
from shared_experts.layout import Q4G32, Q4G64, RecordLayout
from tests.fakes.expert_records import records

f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
f32_near_one = st.floats(min_value=0.5, max_value=2, width=32)


def nearest_f32(exact: Fraction) -> float:
    """The fp32 nearest to an exact value, ties to even, by search among neighbours."""
    limit = Fraction(2) ** 128  # where infinity stands
    if abs(exact) >= limit - Fraction(2) ** 103:
        return math.copysign(math.inf, exact)
    guess = np.float32(math.copysign(min(abs(float(exact)), float(np.finfo(np.float32).max)), exact))
    with np.errstate(all="ignore"):
        near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return float(
        min(filter(np.isfinite, near), key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) % 2))
    )


@given(a=f32, b=f32, c=f32)
def test_fma_rounds_once(a, b, c):
    check_fma(a, b, c)


@given(a=f32_near_one, b=f32_near_one, shift=st.integers(-60, 60), low=st.integers(-3, 3))
def test_fma_rounds_once_where_the_sum_almost_ties(a, b, shift, low):
    product = np.float32(a) * np.float32(b)
    check_fma(a, b, float(np.float32(math.ldexp(float(product), shift)) * np.float32(1 + low * 2**-23)))


def check_fma(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    with np.errstate(all="ignore"):
        got = reference.fma(*(np.array([v], np.float32) for v in (a, b, c)))[0]
    assert float(got) == nearest_f32(exact)


def test_fma_of_a_double_rounding_case():
    # 1 + 2^-24 + 2^-60: fp64 rounds the last term away, leaving a tie that would go to even.
    tiny = np.float32(2.0**-30)
    got = reference.fma(np.array([tiny]), np.array([tiny]), np.array([1 + 2.0**-23], np.float32))
    assert got[0] == np.float32(1 + 2.0**-23)
    a, b = np.array([1 + 2.0**-12], np.float32), np.array([1 + 2.0**-12], np.float32)  # 1 + 2^-11 + 2^-24
    c = np.array([2.0**-60], np.float32)
    assert reference.fma(a, b, c)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)


def test_exp_scales_by_exact_powers_of_two():
    x = np.array([88.0], np.float32)  # n is 127
    assert reference.exp(x)[0] == np.float32(0.97074455) * np.float32(2.0**127)


def test_exp_is_close_and_clamped():
    x = np.linspace(-87, 88, 20001, dtype=np.float32)
    got = reference.exp(x).astype(np.float64)
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 2e-7
    np.testing.assert_array_equal(
        reference.exp(np.array([-np.inf, -1e9, np.inf, 1e9], np.float32)),
        reference.exp(np.array([-87, -87, 88, 88], np.float32)),
    )
    assert np.isnan(reference.exp(np.array([np.nan], np.float32))[0])


@given(values=st.lists(f32, min_size=32, max_size=32))
def test_quantise_keeps_every_value_within_half_a_step(values):
    x = np.array(values, np.float32)
    q, s = reference.quantise(x, 32)
    m = np.abs(x).max()
    assert q.shape == (1, 32)
    if m < 2.0**-100:
        assert s[0] == 0
        assert not q.any()
        return
    assert np.abs(q).max() == 127
    assert np.float32(m / np.float32(127)) == s[0]
    error = np.abs(q[0] * s[0].astype(np.float64) - x)
    assert error.max() <= 0.5001 * float(s[0]) + 1e-45


def test_quantise_at_its_limits():
    x = np.zeros((4, 32), np.float32)
    x[0, 3] = 2.0**-100
    x[1, 3] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    x[2, 3] = np.inf
    x[3, 3] = -np.nan
    q, s = reference.quantise(x.reshape(-1), 32)
    assert q[0, 3] == 127
    assert s[0] > 0
    assert s[1] == 0
    assert np.isnan(s[2:]).all()
    assert not q[1:].any()


def test_quantise_rounds_halves_to_even():
    x = np.zeros(32, np.float32)
    x[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    q, _ = reference.quantise(x, 32)
    assert q[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_an_expert_is_close_to_the_dense_product():
    rng = np.random.default_rng(3)
    for format, h, i in ((Q4G64, 320, 192), (Q4G32, 96, 160)):
        layout = RecordLayout.of(format, h, i)
        record = records(layout, 1, rng)[0]
        x = rng.standard_normal(h).astype(np.float32)

        def dense(codes_at: int, scales_at: int, rows: int, k: int, record=record, g=format.group) -> np.ndarray:
            w = np.empty((rows, k))
            for r in range(rows):
                for e in range(k):
                    block, j = divmod(e, g)
                    byte = int(record[codes_at + r * k // 2 + block * g // 2 + j % (g // 2)])
                    nibble = byte >> 4 if j >= g // 2 else byte & 15
                    scale = record[scales_at + 2 * (r * k // g + block) :][:2].view(np.float16)[0]
                    w[r, e] = (nibble - 8) * float(scale)
            return w

        gate_up = dense(layout.gate_up_codes, layout.gate_up_scales, 2 * i, h) @ x
        hidden = gate_up[:i] / (1 + np.exp(-gate_up[:i])) * gate_up[i:]
        want = dense(layout.down_codes, layout.down_scales, h, i) @ hidden
        got = reference.expert(layout, record.tobytes(), x)
        assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
