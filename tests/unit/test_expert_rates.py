"""What a share is told of the CPU: the time of the kernel's calls, as a line through one expert and a layer of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.experts.gpu import rates
from lanes.experts.gpu.rates import Line, line_of
from lanes.experts.native import ExpertKernel
from tests.fakes.records import FakeRegion


@given(st.floats(0, 100), st.floats(0.1, 100), st.integers(2, 40))
def test_a_line_through_two_counts(start, each, count):
    line = line_of(start + each, start + count * each, count)
    assert line.each_us == pytest.approx(each, abs=1e-6)
    assert line.start_us == pytest.approx(start, abs=1e-6)


def test_a_line_is_never_below_nothing():
    assert line_of(30.0, 20.0, 10) == Line(30.0, 0.0)  # a disturbed measurement
    assert line_of(30.0, 3000.0, 10) == Line(0.0, 30.0)  # a start of less than nothing
    assert line_of(30.0, 30.0, 1) == Line(0.0, 30.0)


def test_only_the_kernels_time_counts(monkeypatch):
    """A kernel that takes 7 us to begin and 3 an expert, by a clock that the calls move."""
    region = FakeRegion("q4g32", 96, 64, 2, 12)
    kernel = ExpertKernel(region.layout, threads=2)
    home = np.array([region.record_address(n, e) for n in range(2) for e in range(12)], np.uint64)
    cpu, now_s = rates.CpuTimes(kernel, home, 4), [0.0]
    run, counts = cpu._run, []

    def counted(count, records):
        code = run(count, records)  # really computes
        counts.append(count)
        now_s[0] += (7 + 3 * count) * 1e-6
        return code

    cpu._run = counted
    monkeypatch.setattr(rates.time, "perf_counter", lambda: now_s[0])
    line = cpu.measured(lambda rounds: rounds >= 5)
    kernel.close()
    assert counts == [1, 4] * (rates.WARM_UP + 5)
    assert line.start_us == pytest.approx(7, abs=1e-3)
    assert line.each_us == pytest.approx(3, abs=1e-3)


def test_what_a_copy_costs_in_misses():
    measured = rates.Rates(link_us=56.0, cpu_us=24.0, cpu_start_us=5.0, link_alone_us=54.0, cpu_alone_us=21.0)
    assert rates.copy_misses(50.0, measured) == pytest.approx(2 / 3 * 50 / 16.8)
    slow_cpu = rates.Rates(56.0, 1e6, 0.0, 54.0, 1e6)
    assert rates.copy_misses(50.0, slow_cpu) == 1.0
    assert np.isfinite(rates.copy_misses(50.0, rates.Rates(56.0, 0.0, 0.0, 54.0, 0.0)))
