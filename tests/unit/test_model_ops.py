"""Shared operations of models against plain definitions."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lanes.models.ops import causal_conv, product, rms, rotate, top_lowest

torch.set_num_threads(1)  # test workers share the cores

few_values = st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-38, 1e-45, 3.4e38, float("inf")])


@given(st.data(), st.integers(1, 30), st.integers(1, 4))
def test_top_lowest_is_a_stable_sort(data, n, rows):
    scores = [data.draw(st.lists(few_values | st.floats(0, 10, width=32), min_size=n, max_size=n)) for _ in range(rows)]
    k = data.draw(st.integers(1, n))
    scores = torch.tensor(scores).tolist()  # as fp32 has them: two close doubles may be one
    expected = [sorted(sorted(range(n), key=lambda i: (-row[i], i))[:k]) for row in scores]
    assert top_lowest(torch.tensor(scores), k).tolist() == expected


def test_top_lowest_takes_a_negative_score_last():
    assert top_lowest(torch.tensor([-1.0, 0.0, -1.0, -0.0, -1.0]), 3).tolist() == [0, 1, 3]


def test_causal_conv_is_a_padded_convolution():
    random = torch.Generator().manual_seed(0)
    for taps, dilation, rows in ((4, 1, 9), (4, 3, 5), (2, 4, 1)):
        x = torch.randn(rows, 6, generator=random)
        weight = torch.randn(6, taps, generator=random)
        tail = (taps - 1) * dilation
        expected = F.conv1d(F.pad(x.T[None], (tail, 0)), weight[:, None], groups=6, dilation=dilation)[0].T
        columns = torch.cat((torch.zeros(tail, 6), x))
        ours = causal_conv(columns, list(weight.T), dilation)
        torch.testing.assert_close(ours, expected)
        for cut in range(1, rows):  # the same bits however the rows are cut
            parts = (columns[: tail + cut], columns[cut:])
            assert torch.equal(torch.cat([causal_conv(p, list(weight.T), dilation) for p in parts]), ours)


def test_rotation_is_a_complex_product():
    x, angle = torch.randn(5, 3, 12), torch.rand(5, 4) * 6
    ours = rotate(x, angle.cos()[:, None], angle.sin()[:, None])
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(ours, torch.cat((turned.real, turned.imag, x[..., 8:]), -1))


def test_rms_and_product():
    x = torch.randn(4, 8)
    torch.testing.assert_close(rms(x, 1e-6), F.rms_norm(x, (8,), eps=1e-6))
    matrix = torch.randn(3, 8).bfloat16()
    out = product(x, matrix)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.bfloat16().float() @ matrix.float().T, atol=0.05, rtol=0.02)
