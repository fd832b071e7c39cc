"""The line of the CPU's share: what it says of times it has seen, and the split it leads to in a made-up lane."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts import climb, cpu_line
from lanes.experts.cpu_line import Line, Seen
from lanes.experts.split import cpu_share_table

PAIRS, CHOSEN, LAYERS = 40, 10, 48
LINK_US, TRUE = 56.0, Line(27.0, 27.0)
REST_US = 5500.0  # of a window: what has nothing to do with misses


def layers_of(counts: dict[int, int]) -> np.ndarray:
    layers = np.zeros(PAIRS + 1, np.int64)
    for count, number in counts.items():
        layers[count] = number
    return layers


def ns_of(layers, line: Line) -> np.ndarray:
    return (layers * (line.start_us + np.arange(PAIRS + 1) * line.each_us) * 1e3 * (np.arange(PAIRS + 1) > 0)).astype(
        np.int64
    )


@settings(max_examples=100)
@given(
    st.floats(0, 200), st.floats(1, 200), st.floats(0, 200), st.floats(0, 200),
    st.dictionaries(st.integers(1, PAIRS), st.integers(20, 200), min_size=2),
)  # fmt: skip
def test_times_of_a_line_give_that_line(start, each, first_start, first_each, counts):
    seen, line = Seen.of(Line(first_start, first_each), PAIRS), Line(start, each)
    for _ in range(200):
        layers = layers_of(counts)
        seen = cpu_line.after(seen, 8, layers, ns_of(layers, line))
    for count in counts:
        assert seen.line.us(count) == pytest.approx(line.us(count), rel=0.02, abs=0.1)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, PAIRS), st.integers(0, 500), st.integers(0, 1 << 40)), max_size=30),
    st.floats(0, 1e4), st.floats(0, 1e4),
)  # fmt: skip
def test_no_part_of_a_line_is_below_nothing(given_layers, start, each):
    seen = Seen.of(Line(start, each), PAIRS)
    for count, number, ns in given_layers:
        layers = layers_of({count: number})
        seen = cpu_line.after(seen, 8, layers, layers_of({count: ns}))
        assert seen.line.each_us >= 0
        assert seen.line.start_us >= -1e-6 * seen.line.us(1)


def test_few_layers_say_nothing_and_a_cost_that_is_not_seen_shrinks():
    seen = Seen.of(Line(100.0, 500.0), PAIRS)
    layers = layers_of({0: 480, 1: int(cpu_line.LEAST) - 1})
    seen = cpu_line.after(seen, int(cpu_line.HOPE), layers, ns_of(layers, TRUE))
    assert (seen.line.start_us, seen.line.each_us) == (50.0, 250.0)
    layers = layers_of({1: int(cpu_line.LEAST)})
    seen = cpu_line.after(seen, 8, layers, ns_of(layers, TRUE))
    assert seen.line.us(1) == pytest.approx(54.0)


def test_an_expert_that_is_not_seen_is_never_believed_to_cost_nothing():
    """A lane with everything in VRAM: ten thousand windows miss nothing, and a copy's price follows from the line."""
    nothing = layers_of({0: 8 * LAYERS})
    floored, free = Seen.of(TRUE, PAIRS, 13.5), Seen.of(TRUE, PAIRS)
    for _ in range(1250):
        floored, free = (cpu_line.after(seen, 8, nothing, nothing) for seen in (floored, free))
    assert free.line.each_us < 1e-3
    assert floored.line.each_us == 13.5
    assert floored.line.start_us < 1e-3
    assert cpu_share_table(PAIRS, LINK_US, floored.line.each_us, floored.line.start_us)[1] == 1, "it is tried again"
    below = cpu_line.after(Seen.of(Line(9.0, 9.0), PAIRS, 13.5), 8, nothing, nothing)
    assert below.line.each_us == 9.0, "a hope makes nothing dearer"


def test_an_experts_part_of_what_was_seen_is_no_less_than_that_unless_all_of_it_is():
    """Layers of one and of two take almost as long: by the noise, or by what a share takes before its first expert."""
    layers = layers_of({1: 400, 2: 400})
    flat = layers_of({1: 400 * 58_000, 2: 400 * 60_000})
    fast = layers_of({1: 400 * 8_000, 2: 400 * 16_000})
    seen, quick = Seen.of(TRUE, PAIRS, 13.5), Seen.of(TRUE, PAIRS, 13.5)
    for _ in range(40):
        seen, quick = cpu_line.after(seen, 8, layers, flat), cpu_line.after(quick, 8, layers, fast)
    assert seen.line.each_us == 13.5
    assert seen.line.us(4 / 3) == pytest.approx((58 + 30) / 1.5, rel=1e-3), "of both, the layer of two weighs half"
    assert quick.line.us(1) == pytest.approx(8.0, rel=0.05)


class Made:
    """A lane whose layers miss as a drifting conversation's do; times differ by a tenth from one to the next."""

    def __init__(self, first: Line, seed: int, least_us: float = 0.0) -> None:
        self.rng, self.line, self.link_us = np.random.default_rng(seed), TRUE, LINK_US
        self.seen, self.climb = Seen.of(first, PAIRS, least_us), climb.Climb()
        self.topic = 0.33

    def table(self):
        line = self.seen.line.times(2.0**self.climb.used)
        return cpu_share_table(PAIRS, LINK_US, line.each_us, line.start_us)

    def run(self, windows: int) -> float:
        """Mean of window / best window, without the noise."""
        off, layers, ns = [], np.zeros(PAIRS + 1, np.int64), np.zeros(PAIRS + 1)
        for number in range(windows):
            if number % 200 == 0:
                self.topic = self.rng.uniform(0.25, 0.42)
            share = np.clip(self.rng.beta(4, 4 / self.topic - 4, LAYERS), 0, 1)
            misses = self.rng.binomial(CHOSEN, share)
            best = self.us(cpu_share_table(PAIRS, self.link_us, self.line.each_us, self.line.start_us), misses).sum()
            took = self.table()[misses]
            us = self.us(self.table(), misses).sum()
            off.append((REST_US + us) / (REST_US + best))
            np.add.at(layers, took, 1)
            np.add.at(ns, took, 1e3 * self.cpu_us(took) * self.rng.gamma(100, 0.01, LAYERS))
            window_ns = 1e3 * (REST_US + us) * self.rng.normal(1, 0.05)
            self.climb = climb.after(self.climb, 1, int(window_ns))
            if number % 8 == 7:
                self.seen = cpu_line.after(self.seen, 8, layers, ns.astype(np.int64))
                layers[:], ns[:] = 0, 0
        return float(np.mean(off))

    def cpu_us(self, taken):
        return np.where(taken > 0, self.line.start_us + taken * self.line.each_us, 0.0)

    def us(self, table, misses):
        taken = table[misses]
        return np.maximum(self.cpu_us(taken), (misses - taken) * self.link_us)


WRONG = [
    Line(56.0, 42.0), Line(97.0, 36.0), Line(5.0, 5.0), Line(0.0, 100.0), Line(300.0, 300.0), Line(2000.0, 500.0),
    Line(200.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("least_us", [0.0, 13.5, 21.0])  # without, by a good start, by a bad one
@pytest.mark.parametrize("first", WRONG, ids=str)
def test_from_a_wrong_start_the_best_split_is_found_soon_and_kept(first, least_us):
    lane = Made(first, 1, least_us)
    lane.run(200)
    assert lane.run(200) < 1.03
    assert lane.run(2000) < 1.03


def test_it_follows_a_neighbour_that_comes_and_goes():
    lane = Made(TRUE, seed=2)
    assert lane.run(400) < 1.02
    lane.line = Line(60.0, 60.0)
    lane.run(96)
    assert lane.run(200) < 1.03
    lane.line = TRUE
    lane.run(96)
    assert lane.run(200) < 1.03


def test_a_cpu_that_became_useless_is_left_alone_and_tried_again():
    lane = Made(TRUE, seed=3)
    lane.run(100)
    lane.line = Line(1000.0, 1000.0)
    lane.run(200)
    assert lane.run(400) < 1.15  # what trying costs
    lane.line = TRUE
    lane.run(600)
    assert lane.run(200) < 1.03
