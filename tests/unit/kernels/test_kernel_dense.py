"""The small kernels between products, in the interpreter."""

import pytest
import triton

from lanes.kernels import sampling
from tests.fakes import kernel_dense as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize(("rows", "streams", "hidden"), [(1, 4, 96), (3, 2, 64)])
def test_the_streams(rows, streams, hidden):
    cases.check_enter("cpu", rows, streams, hidden)


@pytest.mark.parametrize("vocabulary", [64, 65, 300])
def test_greatest(monkeypatch, vocabulary):
    monkeypatch.setattr(sampling, "BLOCK", 64)
    cases.check_greatest("cpu", 3, vocabulary)


@pytest.mark.parametrize("vocabulary", [64, 65, 300])
def test_likeliest(monkeypatch, vocabulary):
    monkeypatch.setattr(sampling, "BLOCK", 64)
    cases.check_likeliest("cpu", 3, vocabulary)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (4, 2100), (2, 4096)])
def test_rows_normed(rows, width):
    cases.check_normed("cpu", rows, width)


@pytest.mark.parametrize(("streams", "hidden", "taps", "dilation"), [(2, 48, 4, 3), (3, 64, 2, 2), (1, 96, 5, 1)])
def test_an_ngram_layer(streams, hidden, taps, dilation):
    cases.check_ngram("cpu", streams, hidden, taps, dilation)


def test_uniform():
    cases.check_uniform("cpu")
