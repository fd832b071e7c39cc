"""The CPU's share of misses on the GPU that is there: captured windows, every bit, and a thread that is lost."""

import time

import numpy as np
import pytest
import torch

from bench.frozen import Frozen, threads
from lanes.errors import HandshakeLost
from lanes.experts.gpu import probe
from lanes.experts.gpu.doorbell import KernelWords, StreamWords
from tests.fakes.gpu_experts import Captured, Rig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = {"format": "q4g64", "hidden": 2560, "inner": 640, "layers": 4, "experts": 16, "chosen": 10}
MOST = np.arange(41, dtype=np.int32)


@pytest.fixture
def rig():
    made, before = [], threads()

    def make(counts, doorbell=KernelWords, slots=24, **options):
        rig = Rig("cuda", slots, **SIZES)
        opened = rig.share

        def share(*arguments, **options):
            made.append(opened(*arguments, **options))
            return made[-1]

        rig.share = share  # what a test opens is closed, too
        first = rig.share(counts, **options)
        first.doorbell = doorbell(*first.words)
        return rig

    yield make
    for share in made:
        share.close()
    torch.cuda.synchronize()
    until_s = time.monotonic() + 10  # a thread is seen for a moment after its end
    while threads() - before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not threads() - before, "a share is open"


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


def test_the_start_takes_kernels_words_or_says_why(rig):
    r, refused = rig(MOST), []
    r.experts.share.close()
    share = probe.attach(r.experts, r.share, lambda name, why: refused.append((name, why)))
    tried = [name for name, _ in refused] + [share.doorbell.name]
    assert tried == [kind.name for kind in probe.KINDS][: len(tried)]
    assert tried[0] == "kernel", "ADR 0058: it was faster"


def test_the_start_takes_stream_words_where_kernels_words_are_wrong(rig, monkeypatch):
    class Hasty(KernelWords):
        name = "hasty"

        def answered(self, number):
            return None

    monkeypatch.setattr(probe, "KINDS", (Hasty, StreamWords))
    r, refused = rig(MOST), []
    r.experts.share.close()
    share = probe.attach(r.experts, r.share, lambda name, why: refused.append(name))
    assert (refused, share.doorbell.name) == (["hasty"], "stream")
    with Captured(r, 1) as window:
        window.check(0)


@pytest.mark.parametrize("doorbell", [KernelWords, StreamWords])
@pytest.mark.parametrize("how", ["frozen", "ended"])
def test_a_lost_thread_is_an_error_in_time(rig, doorbell, how):
    others = threads()
    r = rig(MOST, doorbell, silence_s=4.0)
    with Captured(r, 1) as window:
        window.check(0)
        frozen = Frozen(others) if how == "frozen" else None
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
