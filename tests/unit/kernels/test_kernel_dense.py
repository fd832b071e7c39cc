"""The small kernels between products, in the interpreter."""

import pytest
import triton

from lanes.kernels import sampling, stream
from tests.fakes import kernel_dense as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize(("rows", "streams", "hidden", "lowrank"), [(1, 4, 96, 20), (3, 2, 64, 16)])
def test_a_hyper_connection(monkeypatch, rows, streams, hidden, lowrank):
    monkeypatch.setattr(stream, "MIX_COLUMNS", 64)
    cases.check_stream("cpu", rows, streams, hidden, lowrank)


def test_the_last_mixer_has_no_injection():
    cases.check_stream("cpu", 2, 4, 64, 8, injects=False)


@pytest.mark.parametrize(("size", "rotated"), [(32, 32), (32, 8), (24, 12)])
def test_heads(size, rotated):
    cases.check_norm_rotate("cpu", 3, 2, size, rotated)


@pytest.mark.parametrize("vocabulary", [64, 65, 300])
def test_argmax(monkeypatch, vocabulary):
    monkeypatch.setattr(sampling, "BLOCK", 64)
    cases.check_argmax("cpu", 3, vocabulary)


def test_uniform():
    cases.check_uniform("cpu")
