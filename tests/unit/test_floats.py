"""16- and 8-bit floats: the truth against torch, and the native twins against the truth, exhaustively."""

import numpy as np
import pytest
import torch

from shared_experts import codecs
from shared_experts.floats import NotFinite, load_floats

FLOATS = load_floats()
FINITE = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
SCALES = [1.0, 0.3, 1.7e-3, 2.0**-140, 1e-38, 3.4e38 / 448, 2.0**-20 * 1.9999999]


def test_every_code_of_e4m3_is_what_torch_says():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(codecs.E4M3[FINITE].view(np.uint32), theirs[FINITE].view(np.uint32))
    assert np.isnan(codecs.E4M3[[0x7F, 0xFF]]).all()
    assert np.nanmax(codecs.E4M3) == codecs.LARGEST_E4M3


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_times_a_scale_is_one_fp32_product(scale):
    out = np.empty(len(FINITE), np.float32)
    scales = np.array([[scale]], np.float32)
    FLOATS.from_e4m3(FINITE, 0, len(FINITE), scales, (1, len(FINITE)), out)
    wide = torch.from_numpy(FINITE.copy()).view(torch.float8_e4m3fn).float() * torch.tensor(scale, dtype=torch.float32)
    np.testing.assert_array_equal(out.view(np.uint32), wide.numpy().view(np.uint32))
    truth = codecs.f32_from_e4m3(FINITE[None], scales, (1, len(FINITE)))[0]
    np.testing.assert_array_equal(out.view(np.uint32), truth.view(np.uint32))


@pytest.mark.parametrize("shape", [(128, 128), (130, 1), (1, 300), (257, 129), (384, 256), (5, 7)])
def test_blocks_also_at_the_edges_and_from_any_start(shape):
    random = np.random.default_rng(shape[0])
    codes = FINITE[random.integers(0, len(FINITE), shape)]
    scales = random.uniform(1e-4, 3, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    truth = codecs.f32_from_e4m3(codes, scales, (128, 128)).ravel()
    for block_row in range(scales.shape[0]):  # the truth itself, block by block
        for block_column in range(scales.shape[1]):
            part = np.s_[128 * block_row : 128 * block_row + 128, 128 * block_column : 128 * block_column + 128]
            wanted = codecs.E4M3[codes[part]] * scales[block_row, block_column]
            np.testing.assert_array_equal(truth.reshape(shape)[part], wanted)
    flat = codes.ravel()
    for start, end in [(0, flat.size), *np.sort(random.integers(0, flat.size, (20, 2)), axis=1).tolist()]:
        out = np.full(end - start, 7, np.float32)
        FLOATS.from_e4m3(flat[start:end], start, shape[1], scales, (128, 128), out)
        np.testing.assert_array_equal(out.view(np.uint32), truth[start:end].view(np.uint32))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_refused_by_place(code):
    codes = np.zeros(1000, np.uint8)
    codes[777] = code
    with pytest.raises(NotFinite) as refusal:
        FLOATS.from_e4m3(codes, 24, 64, np.ones((1, 1), np.float32), (128, 128), np.empty(1000, np.float32))
    assert refusal.value.index == 777


def test_bf16_every_value_both_ways():
    every = np.arange(1 << 16).astype(np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    out = np.empty(len(finite), np.float32)
    FLOATS.from_bf16(finite, out)
    np.testing.assert_array_equal(out.view(np.uint32), codecs.f32_from_bf16(finite).view(np.uint32))
    np.testing.assert_array_equal(FLOATS.to_bf16(out), finite)
    FLOATS.check_bf16(finite)
    for bits in every[(every & 0x7F80) == 0x7F80][::37]:
        spoilt = np.append(finite[:100], bits)
        for convert in (FLOATS.check_bf16, lambda x: FLOATS.from_bf16(x, np.empty(len(x), np.float32))):
            with pytest.raises(NotFinite) as refusal:
                convert(spoilt)
            assert refusal.value.index == 100


def test_bf16_rounds_as_the_truth_does():
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits[:50_000] = bits[:50_000] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32)
    values = values[np.abs(values) < 3e38]
    np.testing.assert_array_equal(FLOATS.to_bf16(values), codecs.bf16_from_f32(values))


@pytest.mark.parametrize("bits", [0x7F7F8000, 0xFF7F8000, 0x7F800000, 0x7FC00000])
def test_values_that_bf16_cannot_hold_are_refused(bits):
    values = np.array([1.0, 2.0, 3.0], np.float32)
    values.view(np.uint32)[1] = bits
    with pytest.raises(NotFinite, match="element 1 is too large for bf16"):
        FLOATS.to_bf16(values)
