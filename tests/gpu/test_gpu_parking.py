"""Conversations in and out of the memory of the GPU that is there and the park pool: the bench compares every bit."""

import json

import pytest
import torch

from bench import parking

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(("scale", "tokens"), [("small", 3001), ("gigabyte", 1000)])
def test_a_conversation_goes_its_whole_way(tmp_path, scale, tokens):
    out = tmp_path / "parking.json"
    assert parking.main(["--scale", scale, "--tokens", str(tokens), "--repeats", "1", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["milliseconds"]["copy_back"] > 0
