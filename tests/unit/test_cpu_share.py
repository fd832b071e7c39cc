"""The CPU's share against a test that plays the GPU: right rows, right order, and every way to lose each other ends."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.frozen import Frozen
from lanes.errors import HandshakeLost
from lanes.experts.native import ExpertKernel
from lanes.experts.share import CpuShare, Tables, block_of
from lanes.experts.split import marked, split
from tests.fakes.gpu_side import GpuSide
from tests.fakes.records import FakeRegion

LAYERS, EXPERTS, ROWS, CHOSEN, HIDDEN, INNER = 3, 12, 4, 3, 96, 64
PAIRS = ROWS * CHOSEN


class Bench:
    """Kernel, tables, block, share and the GPU's side."""

    def __init__(self, *, silence_s: float = 60.0, threads: int = 2) -> None:
        self.region = FakeRegion("q4g32", HIDDEN, INNER, LAYERS, EXPERTS)
        self.kernel = ExpertKernel(self.region.layout, threads=threads)
        self.rng = np.random.default_rng(5)
        self.tables = Tables(
            np.array([[self.region.record_address(n, e) for e in range(EXPERTS)] for n in range(LAYERS)], np.uint64),
            np.zeros((PAIRS + 1, 2), np.int64),
            np.zeros((LAYERS, 2), np.int64),
        )
        size = block_of(self.kernel, ROWS, CHOSEN).bytes
        raw = np.zeros(size + 64, np.uint8)
        self.memory = raw[-raw.ctypes.data % 64 :][:size]
        self.share = CpuShare(self.kernel, self.tables, self.memory, ROWS, CHOSEN, silence_s=silence_s)
        self.gpu = GpuSide(self.share, self.memory, ROWS, CHOSEN, HIDDEN)

    def choose(self, rows: int) -> np.ndarray:
        return np.stack([np.sort(self.rng.choice(EXPERTS, CHOSEN, replace=False)) for _ in range(rows)]).astype(
            np.int32
        )

    def ended(self, reason: str) -> None:
        with pytest.raises(HandshakeLost, match=reason):
            self._watch(60)
        with pytest.raises(HandshakeLost, match=reason):
            self.share.arm(1)

    def _watch(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.share.check()
            time.sleep(0.001)


@pytest.fixture
def bench():
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.share.close()
        one.kernel.close()


def test_windows_of_every_size(bench):
    b = bench()
    shares = np.zeros(PAIRS + 1, np.int64)
    for window in range(12):
        rows = window % ROWS + 1
        counts = np.minimum(window % 5, np.arange(PAIRS + 1)).astype(np.int32)
        b.share.arm(LAYERS)
        assert b.share.check() or b.gpu.done[0] == LAYERS
        for layer in range(LAYERS):
            ids, x = b.choose(rows), b.rng.standard_normal((rows, HIDDEN)).astype(np.float32)
            part = split(ids, b.rng.random(EXPERTS) < window / 12, counts)
            shares[len(part.taken)] += 1
            b.gpu.ring(layer + 1, layer, marked(ids, part.slots), x)
            assert b.gpu.wait(layer + 1)
            want = np.full((len(part.pair_rows), HIDDEN), np.nan, np.float32)
            check = ExpertKernel(b.region.layout, isa="scalar")
            check.run(b.tables.addresses[layer, part.taken], part.offsets, part.pair_rows, x, want)
            np.testing.assert_array_equal(b.gpu.y[: len(want)], want)
            assert np.isnan(b.gpu.y[len(want) :]).all()  # nothing else was written
        while b.share.check():  # the tables are whole when it is idle
            pass
        times = b.tables.times.reshape(-1)
        assert (np.diff(times) >= 0).all()  # seen, answered, seen, ...
        assert times[0] > 0
    number, spent_ns = b.tables.spent.T
    np.testing.assert_array_equal(number, shares)
    assert ((spent_ns > 0) == (shares > 0)).all()


def test_a_window_in_flight_is_not_armed_again(bench):
    b = bench()
    b.share.arm(2)
    assert b.share.check()
    with pytest.raises(ValueError, match="out of bounds"):
        b.share.arm(2)


def test_a_window_has_no_more_layers_than_there_are(bench):
    with pytest.raises(ValueError, match="out of bounds"):
        bench().share.arm(LAYERS + 1)


def test_silence_inside_a_window_ends_it_and_none_between_windows_does(bench):
    b = bench(silence_s=0.2)
    b.share.arm(1)
    b.gpu.ring(1, 0, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    assert b.gpu.wait(1)
    time.sleep(0.6)  # idle for longer than the limit
    assert not b.share.check()
    b.share.arm(1)
    assert not b.gpu.wait(1)  # nobody rings: released, not hung
    b.ended("no doorbell")


@pytest.mark.parametrize("word", [2, 7, 2**63])
def test_a_doorbell_out_of_order(bench, word):
    b = bench()
    b.share.arm(3)
    b.gpu.doorbell[0] = word
    assert not b.gpu.wait(1)
    b.ended("out of order")


@pytest.mark.parametrize(
    ("layer", "rows", "ids"),
    [(LAYERS, 1, [0, 1, 2]), (-1, 1, [0, 1, 2]), (0, 0, [0, 1, 2]), (0, ROWS + 1, [0, 1, 2]),
     (0, 1, [0, 1, EXPERTS]), (0, 1, [0, 1, ~EXPERTS]), (0, 1, [1, 1, 2])],
)  # fmt: skip
def test_inputs_out_of_range(bench, layer, rows, ids):
    b = bench()
    b.share.arm(1)
    b.gpu.layer[0], b.gpu.rows[0] = layer, rows
    b.gpu.ids[:CHOSEN] = ids
    b.gpu.doorbell[0] = 1
    assert not b.gpu.wait(1)
    b.ended("out of range")


def test_stopping_releases_the_window(bench):
    b = bench()
    b.share.arm(2)
    b.gpu.ring(1, 0, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    assert b.gpu.wait(1)
    b.share.close()
    assert not b.gpu.wait(2)
    b.ended("stopped")
    b.share.close()


def test_a_thread_that_does_not_get_on_is_noticed(bench):
    b = bench(silence_s=1e-6)  # a layer takes far longer than the limit
    b.share.arm(1)
    b.ended("does not get on|no doorbell")


def test_a_stopped_thread_is_noticed_and_comes_back_to_nothing(bench):
    b = bench(silence_s=0.5)
    b.share.arm(2)
    b.gpu.ring(1, 0, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    assert b.gpu.wait(1)
    frozen = Frozen()
    b.gpu.ring(2, 1, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    assert not b.gpu.wait(2)  # released by the thread that looks after it
    b.ended("does not get on")
    frozen.thaw()
    b.share.close()
    assert not b.gpu.wait(2)


def test_a_stopped_thread_that_comes_back_late_finds_all_there_and_computes_nothing(bench):
    b = bench(silence_s=0.5)
    b.share.arm(2)
    b.gpu.ring(1, 0, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    assert b.gpu.wait(1)
    frozen = Frozen()
    thread = Path(f"/proc/self/task/{frozen.thread}")
    b.gpu.ring(2, 1, b.choose(1), np.zeros((1, HIDDEN), np.float32))
    b.ended("does not get on")
    b.share.close()
    b.kernel.close()
    frozen.thaw()
    until_s = time.monotonic() + 60
    while thread.exists() and time.monotonic() < until_s:
        time.sleep(0.001)
    assert not thread.exists()
    assert np.isnan(b.gpu.y).all()


def test_blocks_and_arguments_have_limits(bench):
    b = bench()
    assert block_of(b.kernel, 4, 256).bytes > 0
    for rows, chosen in ((4, 257), (0, 1), (1, 0), (1025, 1)):
        with pytest.raises(ValueError, match="out of bounds"):
            block_of(b.kernel, rows, chosen)
    with pytest.raises(ValueError, match="out of bounds"):
        CpuShare(b.kernel, b.tables, b.memory[: b.share.block.bytes], ROWS, CHOSEN, core=1024)
    with pytest.raises(ValueError, match="memory"):
        CpuShare(b.kernel, b.tables, b.memory[: b.share.block.bytes - 4096], ROWS, CHOSEN)
    with pytest.raises(ValueError, match="addresses"):
        CpuShare(b.kernel, replace(b.tables, addresses=b.tables.addresses.astype(np.int64)), b.memory, ROWS, CHOSEN)
