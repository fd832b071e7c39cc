"""A chunk of a long prompt takes as long as its copies or its kernels, not both: the feed and the ring on a played GPU.

Seconds are those of an H200 and a model of 48 layers: 50 us a record, 8,192 rows, most experts outside VRAM.
"""

import numpy as np
import pytest

from lanes import limits
from lanes.experts.feed import Feed
from lanes.experts.gpu.prompt import RING_SHARE
from lanes.experts.ring import Step
from lanes.reading import Pace, ring_slots
from tests.fakes.timeline import Timeline

LAYERS, EXPERTS, ROWS, RECORD_BYTES, LINK = 48, 512, 8192, 2_613_248, 52e9
RECORD_S = RECORD_BYTES / LINK
LAUNCH_S, PLAN_S, DENSE_LAUNCH_S = 0.15e-3, 0.5e-3, 3e-3  # of the host


def chunk(slots: int, resident: int, dense_s: float, experts_s: float, *, uploads: bool = False) -> Timeline:
    """One pass ahead; seconds of a layer's two parts on the device."""
    keys = np.random.default_rng(1).permutation(LAYERS * EXPERTS)
    here = np.zeros(LAYERS * EXPERTS, np.bool_)
    here[keys[: resident - slots]] = True
    line = Timeline(RECORD_S)
    feed = Feed(slots, here.reshape(LAYERS, EXPERTS), line, LAYERS)
    for layer in range(LAYERS):
        line.compute(dense_s)
        line.work(DENSE_LAUNCH_S)
        begun = feed.begun(layer)
        line.wait()  # for the routing

        def run(step: Step) -> None:
            feed.arrive(step)
            if uploads:
                line.upload()
            line.compute(experts_s * (step.end - step.first) / EXPERTS)
            line.work(LAUNCH_S)
            feed.over(step)

        for step in begun[:1]:
            run(step)
        line.work(PLAN_S)
        for step in begun[1:] + feed.rest(range(EXPERTS)):
            run(step)
    line.wait()
    return line


def ring(dense_s: float, cached: int) -> int:
    """As a lane chooses it."""
    pace = Pace(LINK, 0.0, 0.0, 0.0, dense_s * LAYERS / ROWS, 0.0)
    return min(ring_slots(ROWS, LAYERS, RECORD_BYTES, pace), cached // RING_SHARE)


@pytest.mark.parametrize("cached", [1300, 2400, 4000])  # slots beside the activations of 8,192 rows, by the budget
@pytest.mark.parametrize("dense_ms", [5.0, 9.0, 14.0])
@pytest.mark.parametrize("experts_ms", [6.0, 11.0])
def test_what_takes_longer_hides_the_rest(cached, dense_ms, experts_ms):
    line = chunk(ring(dense_ms * 1e-3, cached), cached, dense_ms * 1e-3, experts_ms * 1e-3)
    assert line.host_s < 1.1 * max(line.copied_s, line.computed_s)
    if line.copied_s > line.computed_s:
        assert line.copied_s / line.host_s > 0.9, "the link's share of the time"


def test_a_small_ring_leaves_the_link_idle_under_a_layers_attention():
    small, chosen = (chunk(slots, 950, 9e-3, 11e-3) for slots in (limits.RING_SLOTS, ring(9e-3, 950)))
    assert chosen.host_s < 0.85 * small.host_s
    assert chosen.copied_s < 1.02 * small.copied_s, "and costs a record a slot"


def test_a_copy_on_the_computing_stream_in_every_step_takes_the_overlap_away():
    """Why there is none (lanes.kernels.places)."""
    none, each = (chunk(ring(9e-3, 950), 950, 9e-3, 11e-3, uploads=uploads) for uploads in (False, True))
    assert each.host_s > 0.95 * (none.copied_s + none.computed_s) > 1.4 * none.host_s
