import itertools

import numpy as np
import pytest

from bench.traces.synthetic import CHOSEN, DIGESTS, EXPERTS, LAYERS, RECIPES, _first_distinct, digest, trace

BEGINNINGS = {
    "stationary": "65420b44732b3137",
    "drifting": "3a20f42a83345501",
    "mixture": "a36fb027532d66e0",
    "conversation": "e934339857e39477",
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_frozen_traces_begin_as_they_did(name):
    """The first 200 windows; the whole is slow to make and checked below and at every replay."""
    assert digest(itertools.islice(trace(name), 200))[:16] == BEGINNINGS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_the_frozen_traces_are_what_they_were(name):
    """A change of one bit is another trace: figures before and after it cannot be compared."""
    shapes = []

    def checked():
        for window in trace(name):
            layers = window.keys // EXPERTS
            assert (np.diff(window.keys) > 0).all()
            assert window.counts.min() >= 1
            assert window.counts.max() <= window.rows
            if window.rows == 1:
                assert np.array_equal(np.bincount(layers, minlength=LAYERS), np.full(LAYERS, CHOSEN))
            else:
                per_layer = np.bincount(layers, weights=window.counts, minlength=LAYERS)
                assert np.abs(per_layer / (window.rows * CHOSEN) - 1).max() < 0.1
            shapes.append(window.rows)
            yield window

    assert digest(checked()) == DIGESTS[name]
    assert shapes.count(1) == RECIPES[name].tokens
    assert (len(shapes) > shapes.count(1)) == bool(RECIPES[name].prefill)


def test_the_digest_sees_every_field():
    windows = [w for _, w in zip(range(3), trace("stationary"), strict=False)]
    first = digest(windows)
    windows[1].counts[7] += 1
    changed = digest(windows)
    windows[1].counts[7] -= 1
    assert digest(windows) == first != changed
    assert digest(reversed(windows)) != first


def test_first_distinct():
    rows = np.array([[3, 3, 5, 1, 3, 9, 8, 7, 6, 5, 20, 21, 22], [4] * 13])
    assert _first_distinct(rows).tolist() == [[3, 5, 1, 9, 8, 7, 6, 20, 21, 22], [4, 0, 1, 2, 3, 5, 6, 7, 8, 9]]
