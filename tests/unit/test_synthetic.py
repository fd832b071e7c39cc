"""A synthetic model is a model: its pack opens, its region is that pack's, and its bytes depend on no thread."""

import contextlib
import hashlib
import mmap
import os
import re

import numpy as np
import pytest

from bench.synthetic import measure, noise, region
from bench.synthetic.pack import DIGESTS, made
from bench.synthetic.routing import Routing
from bench.synthetic.shape import SHAPES
from bench.synthetic.walk import DIGESTS as WALK_DIGESTS
from bench.synthetic.walk import FIRST, walk
from lanes.experts import reference
from shared_experts.errors import PackError
from shared_experts.fill import verify
from shared_experts.layout import EXPERT_FORMATS, REGION_HEADER_BYTES, RecordLayout
from shared_experts.manifest import EXPERTS_FILE
from shared_experts.pack import Pack
from shared_experts.region import RegionShape, check_descriptor

SMALL = SHAPES["small"]


@pytest.fixture
def small_block(monkeypatch):
    monkeypatch.setattr(region, "BLOCK_WORDS", 1 << 14)


@contextlib.contextmanager
def filled(layout, *, threads=1, seed=7):
    shapes = []

    def shaped(digests):
        of = (layout.format.id, layout.hidden, layout.intermediate, 2, 5, layout.record_bytes)
        shapes.append(RegionShape(hashlib.sha256(b"".join(digests)).digest(), *of, digests))
        return shapes[0]

    sealed = region.fill(layout, 2, 5, seed=seed, threads=threads, shaped=shaped)
    try:
        yield sealed, shapes[0]
    finally:
        os.close(sealed.fd)


@pytest.mark.usefixtures("small_block")
@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8"])
def test_lanes_would_take_the_region(format):
    layout = RecordLayout.of(EXPERT_FORMATS[format], 256, 128)
    with filled(layout) as (sealed, shape):
        assert check_descriptor(sealed.fd, shape) == sealed.header
        verify(sealed.fd, shape, threads=1, on_step=lambda step, done: None)
        with pytest.raises(PermissionError):
            mmap.mmap(sealed.fd, shape.total_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
        records = {
            os.pread(sealed.fd, layout.record_bytes, REGION_HEADER_BYTES + n * layout.record_bytes) for n in range(10)
        }
        assert len(records) == 10
        x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
        sizes = [np.sqrt(np.mean(reference.expert(layout, record, x).astype(np.float64) ** 2)) for record in records]
        assert all(0.05 < size < 20 for size in sizes), sizes


@pytest.mark.usefixtures("small_block")
@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8"])
def test_experts_share_no_direction_that_they_would_feed_each_other(format):
    layout = RecordLayout.of(EXPERT_FORMATS[format], 2560, 64)
    noise = np.random.default_rng(0).standard_normal(2560).astype(np.float32)
    with filled(layout) as (sealed, _):
        record = os.pread(sealed.fd, layout.record_bytes, REGION_HEADER_BYTES)
    size, *others = (np.sqrt(np.mean(reference.expert(layout, record, x) ** 2)) for x in (noise, noise * 0 - 1))
    assert max(others) < 4 * size


@pytest.mark.usefixtures("small_block")
def test_experts_depend_on_the_seed_and_not_on_threads():
    layout = RecordLayout.of(EXPERT_FORMATS["q4g64"], 128, 64)
    prints = []
    for threads, seed in ((1, 7), (3, 7), (1, 8)):
        with filled(layout, threads=threads, seed=seed) as (_, shape):
            prints.append(shape.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_pack_of_the_frozen_bytes_whatever_the_threads(tmp_path):
    with made(tmp_path / "one", SMALL, threads=1) as one, made(tmp_path / "three", SMALL, threads=3) as three:
        assert one.manifest.fingerprint == three.manifest.fingerprint
        assert one.digest == DIGESTS["small"]
        check_descriptor(one.region.fd, RegionShape.of(one.manifest))
        verify(one.region.fd, RegionShape.of(one.manifest), threads=1, on_step=lambda step, done: None)
        with Pack.open(one.folder) as pack:
            assert pack.manifest == one.manifest
            assert pack.file("tokenizer.json")
            with pytest.raises(PackError) as error:  # all but the experts, which are not on disk
                pack.verify(threads=1)
            assert re.match(r"experts\.\d", error.value.section)
        assert (one.folder / EXPERTS_FILE).stat().st_blocks * 512 < 1 << 16
    with made(tmp_path / "other", SMALL, seed=2) as other:
        assert other.digest != DIGESTS["small"]
    with made(tmp_path / "plain", SMALL.changed(layers=3, experts=8, ngram=False)) as plain:
        assert plain.manifest.ngram == ()
        assert plain.manifest.experts.layers == 3


@pytest.mark.parametrize("name", SHAPES)
def test_the_frozen_walk_visits_every_token_once(name):
    shape = SHAPES[name]
    found = walk(shape.config.vocab_size, shape.topics)
    assert found.digest() == WALK_DIGESTS[name]
    assert np.array_equal(np.sort(found.order), np.arange(FIRST, shape.config.vocab_size))
    assert np.array_equal(found.successor[found.order[:-1]], found.order[1:])
    assert found.successor[found.order[-1]] == found.successor[0] == found.order[0]
    assert found.stretch(len(found.order) - 1, 2) == [found.order[-1], found.order[0]]
    changes = np.count_nonzero(np.diff(found.topic_of[found.order]))
    assert shape.topics - 1 <= changes <= len(found.order) / 150 + shape.topics


def test_directions_are_orthogonal_and_parts_have_their_sizes():
    routing = Routing(SMALL, walk(SMALL.config.vocab_size, SMALL.topics), noise.Noise(1))
    directions = np.stack([routing._direction(n) for n in range(1 + SMALL.topics)])
    assert np.array_equal(directions @ directions.T, SMALL.config.hidden_size * np.eye(1 + SMALL.topics))
    rows = routing.embedding(0, 0, 600) / 12.0
    assert np.mean(rows**2) == pytest.approx(1, rel=0.02)
    assert np.mean(rows @ directions[0]) / SMALL.config.hidden_size == pytest.approx(0.4, rel=0.05)
    rows_of_head, values = routing.head(0, 0, 600)
    assert values.shape == (595, SMALL.config.hidden_size)
    assert np.array_equal(rows_of_head, routing.walk.successor[5:600])
    own = rows[5:] - rows[5:] @ directions.T / SMALL.config.hidden_size @ directions
    scores = own @ values.T  # every token's best row is its successor's
    assert np.array_equal(scores.argmax(1), np.arange(595))


def test_skew_and_recency_of_known_uses():
    keys = [np.array([0, 10]), np.array([0, 11]), np.array([0, 12]), np.array([0, 10])]
    assert measure.skew(keys, 20, share=0.05) == 0.5  # key 0: four of eight
    assert measure.skew(keys, 20, share=1.0) == 1.0
    # after the first window: layer 0 always finds key 0; layer 1 finds 10 again only among its last three
    assert measure.recent(keys, 2, 10, 1) == 0.5
    assert measure.recent(keys, 2, 10, 3) == pytest.approx(4 / 6)
