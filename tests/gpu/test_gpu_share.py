"""The CPU's share of misses on the GPU that is there: captured windows, every bit, and a thread that is lost."""

import time

import numpy as np
import pytest
import torch

from bench.frozen import Frozen
from lanes.errors import HandshakeLost
from lanes.experts.gpu import probe
from lanes.experts.gpu.doorbell import KernelWords, StreamWords
from tests.fakes.gpu_experts import Captured, Rig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = {"format": "q4g64", "hidden": 2560, "inner": 640, "layers": 4, "experts": 16, "chosen": 10}
MOST = np.arange(41, dtype=np.int32)


@pytest.fixture
def rig():
    made = []

    def make(counts, doorbell=KernelWords, slots=24, **options):
        rig = Rig("cuda", slots, **SIZES)
        made.append(share := rig.share(counts, **options))
        share.doorbell = doorbell(*share.words)
        return rig

    yield make
    for share in made:
        share.close()
    torch.cuda.synchronize()


@pytest.mark.parametrize("doorbell", [KernelWords, StreamWords])
@pytest.mark.parametrize("counts", [MOST, MOST // 2, MOST * 0], ids=["cpu", "half", "link"])
def test_captured_windows_are_equal_to_the_bit(rig, doorbell, counts):
    r = rig(counts, doorbell)
    for rows in (1, 2, 3, 4):
        with Captured(r, rows) as window:
            for seed in range(12):
                window.check(seed)
    assert r.counters.expert_hits > 0
    assert r.counters.expert_misses > 0


def test_the_start_takes_stream_words_or_says_why(rig):
    r, refused = rig(MOST), []
    r.experts.share.close()
    share = probe.attach(r.experts, r.share, lambda name, why: refused.append((name, why)))
    assert share.doorbell.name == "stream" or refused[0][0] == "stream"


@pytest.mark.parametrize("doorbell", [KernelWords, StreamWords])
@pytest.mark.parametrize("how", ["frozen", "ended"])
def test_a_lost_thread_is_an_error_in_time(rig, doorbell, how):
    r = rig(MOST, doorbell, silence_s=4.0)
    with Captured(r, 1) as window:
        window.check(0)
        frozen = Frozen() if how == "frozen" else None
        began_s = time.monotonic()
        r.experts.begin_window(1)
        if frozen is None:
            r.experts.share.close()
        window.replay()
        torch.cuda.synchronize()
        with pytest.raises(HandshakeLost):
            r.experts.end_window()
        assert time.monotonic() - began_s < 15
        if frozen is not None:
            frozen.thaw()
