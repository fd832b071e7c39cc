"""A synthetic region is a region: digests hold, experts are finite and lively, bytes do not depend on threads."""

import contextlib
import json
import mmap
import os

import numpy as np
import pytest

from bench import synthetic
from lanes.experts import reference
from shared_experts.fill import verify
from shared_experts.layout import EXPERT_FORMATS, REGION_HEADER_BYTES, RecordLayout
from shared_experts.region import check_descriptor


@pytest.fixture(autouse=True)
def small_block(monkeypatch):
    monkeypatch.setattr(synthetic, "BLOCK_WORDS", 1 << 14)


@contextlib.contextmanager
def region(layout, *, threads=1, seed=7):
    made, shape = synthetic.fill(layout, 2, 5, seed=seed, threads=threads)
    try:
        yield made, shape
    finally:
        os.close(made.fd)


@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8"])
def test_lanes_would_take_it(format):
    layout = RecordLayout.of(EXPERT_FORMATS[format], 256, 128)
    with region(layout) as (made, shape):
        assert check_descriptor(made.fd, shape) == made.header
        verify(made.fd, shape, threads=1, on_step=lambda step, done: None)
        with pytest.raises(PermissionError):
            mmap.mmap(made.fd, shape.total_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
        records = {
            os.pread(made.fd, layout.record_bytes, REGION_HEADER_BYTES + n * layout.record_bytes) for n in range(10)
        }
        assert len(records) == 10
        x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
        sizes = [np.sqrt(np.mean(reference.expert(layout, record, x).astype(np.float64) ** 2)) for record in records]
        assert all(0.05 < size < 20 for size in sizes), sizes


def test_bytes_depend_on_the_seed_and_not_on_threads():
    layout = RecordLayout.of(EXPERT_FORMATS["q4g64"], 128, 64)
    prints = []
    for threads, seed in ((1, 7), (3, 7), (1, 8)):
        with region(layout, threads=threads, seed=seed) as (_, shape):
            prints.append(shape.fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.slow
def test_the_frozen_trace_is_as_skewed_as_models_are(capsys):
    assert synthetic.main(["--layers", "1", "--experts", "3", "--hidden", "128", "--intermediate", "64"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"command", "versions", "host", "pack", "conditions", "figures"} == set(result)
    assert 0.50 <= result["figures"]["hottest_tenth_takes"] <= 0.65
