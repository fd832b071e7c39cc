"""What the link is believed to cost: what follows from intervals that were seen, and the split of a made-up lane."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts import climb, cpu_line, link_cost
from lanes.experts.cpu_line import Line, Seen
from lanes.experts.link_cost import CANDIDATES, Known
from lanes.experts.split import cpu_share_table

PAIRS, CHOSEN, LAYERS = 40, 10, 48
LINK_US, LINE = 52.0, Line(27.0, 27.0)
ATTENTION_US, OTHER_US = 110.0, 80.0  # the rest of a layer of either kind


class Made:
    """A lane whose layers miss as a drifting conversation's do; what a layer takes differs by a twentieth from one to
    the next, and one window of forty is held up."""

    def __init__(self, believed_us: float, seed: int, line: Line = LINE, missed=(0.2, 0.4)) -> None:
        self.rng, self.line, self.link_us, self.missed = np.random.default_rng(seed), line, LINK_US, missed
        self.seen, self.climb = Seen.of(line, PAIRS), climb.Climb()
        self.known = Known.of(believed_us)
        self.rest_us = np.where(np.arange(LAYERS) % 4 == 3, ATTENTION_US, OTHER_US)
        self.topic, self.windows = 0.3, 0

    def table(self):
        line = self.seen.line.times(2.0**self.climb.used)
        return cpu_share_table(PAIRS, self.known.link_us, line.each_us, line.start_us)

    def run(self, windows: int) -> float:
        """Mean of window / best window, without the noise."""
        off, layers, ns = [], np.zeros(PAIRS + 1, np.int64), np.zeros(PAIRS + 1)
        for _ in range(windows):
            if self.windows % 200 == 0:
                self.topic = self.rng.uniform(*self.missed)
            self.windows += 1
            share = np.clip(self.rng.beta(4, 4 / self.topic - 4, LAYERS), 0, 1)
            misses = self.rng.binomial(CHOSEN, share)
            best = self.us(cpu_share_table(PAIRS, self.link_us, self.line.each_us, self.line.start_us), misses)
            took = self.table()[misses]
            us = self.us(self.table(), misses)
            off.append((self.rest_us + us).sum() / (self.rest_us + best).sum())
            cpu = self.cpu_us(took) * self.rng.gamma(400, 1 / 400, LAYERS)
            link = (misses - took) * self.link_us * self.rng.gamma(400, 1 / 400, LAYERS)
            layer = self.rest_us * self.rng.gamma(400, 1 / 400, LAYERS) + np.maximum(cpu, link)
            if self.rng.random() < 1 / 40:
                layer[self.rng.integers(LAYERS)] += 3000
            np.add.at(layers, took, 1)
            np.add.at(ns, took, 1e3 * cpu)
            self.climb = climb.after(self.climb, 1, int(1e3 * layer.sum()))
            self.known = link_cost.after(self.known, 1, layer[:-1], cpu[:-1], (misses - took)[:-1])
            if self.windows % 8 == 7:
                self.seen = cpu_line.after(self.seen, 8, layers, ns.astype(np.int64))
                self.known = link_cost.judged(self.known, 8)
                layers[:], ns[:] = 0, 0
        return float(np.mean(off))

    def cpu_us(self, taken):
        return np.where(taken > 0, self.line.start_us + taken * self.line.each_us, 0.0)

    def us(self, table, misses):
        taken = table[misses]
        return np.maximum(self.cpu_us(taken), (misses - taken) * self.link_us)


FAST, SLOW, USELESS = Line(10.0, 8.0), Line(60.0, 60.0), Line(1000.0, 1000.0)


@pytest.mark.parametrize("line", [LINE, FAST, SLOW], ids=str)
@pytest.mark.parametrize("missed", [(0.02, 0.05), (0.2, 0.4), (0.6, 0.9)], ids=["few", "some", "most"])
@pytest.mark.parametrize("believed_us", [5.0, 20.0, 52.0, 126.0, 400.0])
def test_from_a_wrong_start_the_best_split_is_found_soon_and_kept(believed_us, missed, line):
    lane = Made(believed_us, 1, line, missed)
    lane.run(128)
    assert lane.run(100) < 1.03
    assert lane.run(400) < 1.03


def test_what_a_lane_starts_with_beside_another_program_costs_it_few_windows():
    """126 us were measured once, where 52 were right: a twentieth of every window for as long as the lane lived."""
    lane = Made(126.0, 2)
    assert lane.run(16) > 1.05
    lane.run(16)
    assert lane.known.link_us == pytest.approx(LINK_US, rel=0.05)
    assert lane.run(200) < 1.02


def test_it_follows_a_link_that_changes():
    lane = Made(LINK_US, 3)
    for link_us in (104.0, 40.0, LINK_US):
        lane.link_us = link_us
        lane.run(200)
        assert lane.known.link_us == pytest.approx(link_us, rel=0.1)
        assert lane.run(100) < 1.03


def test_it_is_never_believed_to_be_faster_than_it_is_alone():
    """Where a longer wait makes the rest of a layer shorter, as weights that are on their way meanwhile do."""
    rng, known, free = np.random.default_rng(8), Known.of(57.0, 54.0), Known.of(57.0)
    for _ in range(64):
        link = rng.integers(0, 5, LAYERS)
        layer = 90.0 * rng.gamma(400, 1 / 400, LAYERS) + 0.5 * link * LINK_US
        known, free = (link_cost.after(each, 1, layer, np.zeros(LAYERS), link) for each in (known, free))
    assert link_cost.judged(known, 8).link_us == 54.0
    assert link_cost.judged(free, 8).link_us < 30.0
    assert Known.of(20.0, 54.0).link_us == 54.0


def test_a_link_that_became_useless_is_left_alone_and_tried_again():
    lane = Made(LINK_US, 4)
    lane.run(100)
    lane.link_us = 1500.0
    lane.run(300)
    assert lane.run(400) < 1.15  # what trying costs
    lane.link_us = LINK_US
    lane.run(1000)
    assert lane.run(200) < 1.03


def test_a_cpu_that_does_nothing_leaves_the_link_alone():
    lane = Made(20.0, 5, USELESS)
    lane.run(200)
    assert lane.run(200) < 1.15  # the CPU is tried now and then
    assert lane.known.link_us == pytest.approx(LINK_US, rel=0.05)


def test_layers_of_windows_of_several_rows_are_compared_with_their_own_kind():
    rng, known, rest_us = np.random.default_rng(6), Known.of(126.0), {1: 90.0, 3: 250.0}
    for window in range(48):
        rows = 1 + 2 * (window % 2)
        link = rng.integers(0, 5, LAYERS)
        layer = rest_us[rows] * rng.gamma(400, 1 / 400, LAYERS) + link * LINK_US
        known = link_cost.after(known, rows, layer, np.zeros(LAYERS), link)
    assert link_cost.judged(known, 8).link_us == pytest.approx(LINK_US, rel=0.05)


def test_nothing_is_believed_of_few_windows_and_a_cost_that_is_not_seen_shrinks():
    known, ones = Known.of(100.0), np.ones(LAYERS)
    for _ in range(int(link_cost.LEAST)):
        assert link_cost.judged(known, 8) is known
        known = link_cost.after(known, 1, 90.0 * ones, 50.0 * ones, np.zeros(LAYERS, np.int64))
    for _ in range(4):
        known = link_cost.after(known, 1, 90.0 * ones, 50.0 * ones, np.zeros(LAYERS, np.int64))
    for _ in range(4):
        known = link_cost.judged(known, 16)
    assert known.link_us == pytest.approx(50.0, rel=0.1)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(0, 1e7), st.floats(0, 1e6), st.integers(0, PAIRS)), min_size=1,
        max_size=30,
    ),
    st.floats(1e-3, 1e6),
)  # fmt: skip
def test_whatever_was_seen_the_cost_is_one_of_the_candidates(windows, believed_us):
    known = Known.of(believed_us)
    for rows, layer_us, cpu_us, experts in windows:
        ones = np.ones(3)
        known = link_cost.after(known, rows, layer_us * ones, cpu_us * ones, np.full(3, experts))
        known = link_cost.judged(known, 8)
        assert known.link_us == believed_us or CANDIDATES[0] <= known.link_us <= 1.05 * CANDIDATES[-1]
