"""The real model over the native kernel: which experts are resident changes counters, never a bit of a logit."""

import numpy as np
import pytest
import torch

from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.runner import ModelRunner
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack

PROMPT = [5, 9, 300, 11, 7, 7, 401, 12, 3, 88, 5, 9]


def never():
    return False


class Bytes:
    """The records of a pack's file, as a region lends them."""

    def __init__(self, pack):
        self._data = np.fromfile(pack.experts_path, np.uint8)
        self._info = pack.manifest.experts

    def record_address(self, layer, expert):
        return self._data.ctypes.data + (layer * self._info.experts + expert) * self._info.record_bytes


def answers(pack, slots, scratch_bytes=1 << 20, rounds=2):
    """Logits of a prompt in chunks of 5 and of 12 greedy steps, `rounds` times over on one warm cache."""
    torch.set_num_threads(1)
    info, counters = pack.manifest.experts, Counters()
    cache = ExpertCache(Bytes(pack), info, slots * info.record_bytes, adaptive, counters)
    kernel = ExpertKernel(info.layout, threads=1)
    store = ExpertStore(kernel, cache, counters, scratch_bytes)
    model = load_model(pack, store)
    runner = ModelRunner(model, StatePool(model.state_shape, model.state_shape.bytes(64)), store)
    seen = []
    for _ in range(rounds):
        slot = runner.begin(64)
        for start in range(0, len(PROMPT), 5):
            logits = runner.forward(Window.of_sequence(PROMPT[start : start + 5], start, slot, logits="all"), never)
            runner.end_window()
            seen.append(logits.copy())
        for position in range(len(PROMPT), len(PROMPT) + 12):
            logits = runner.forward(Window.of_sequence([int(logits[-1].argmax())], position, slot), never)
            runner.end_window()
            seen.append(logits.copy())
        runner.end(slot)
    kernel.close()
    return np.concatenate(seen), counters


@pytest.mark.parametrize("experts", ["f32", "q4g32", "q8"])
def test_cache_budget_changes_no_bit(tmp_path, experts):
    with Pack.open(tiny_pack(tmp_path, experts)) as pack:
        info = pack.manifest.experts
        everything = info.layers * info.experts
        truth, none = answers(pack, 0)
        assert np.isfinite(truth).all()
        assert none.expert_hits == none.cache_used_bytes == 0
        half = len(truth) // 2
        assert np.array_equal(truth[:half], truth[half:]), "the second round differs from the first"
        for slots in (1, 7, everything):
            found, counters = answers(pack, slots)
            assert np.array_equal(found, truth)
            assert counters.cache_used_bytes == counters.cache_budget_bytes or slots == everything
            assert counters.expert_hits + counters.expert_misses == none.expert_misses
            assert counters.expert_hit_bytes + counters.expert_miss_bytes == none.expert_miss_bytes
        assert counters.expert_hits > counters.expert_misses  # the second round is served from the cache
        assert counters.cache_evictions == 0
        assert np.array_equal(answers(pack, 3, scratch_bytes=1)[0], truth)


def test_a_window_is_left_between_two_layers(tmp_path):
    """A cancel in a long prompt chunk does not wait for the chunk."""
    with Pack.open(tiny_pack(tmp_path)) as pack:
        info, counters = pack.manifest.experts, Counters()
        cache = ExpertCache(Bytes(pack), info, 1 << 20, adaptive, counters)
        store = ExpertStore(ExpertKernel(info.layout, threads=1), cache, counters)
        model = load_model(pack, store)
        runner = ModelRunner(model, StatePool(model.state_shape, model.state_shape.bytes(64)), store)
        truth = None
        for asked_before_stop in (10**6, 0, 1, 3, 10**6):
            answers = iter([False] * asked_before_stop + [True] * 100) if asked_before_stop < 10**6 else None
            slot = runner.begin(64)
            window = Window.of_sequence(PROMPT, 0, slot)
            before = counters.expert_hits + counters.expert_misses
            logits = runner.forward(window, (lambda: next(answers)) if answers else never)  # noqa: B023
            runner.end_window()
            runner.end(slot)
            if answers is None:
                truth = logits.copy() if truth is None else truth
                assert np.array_equal(logits, truth), "an abandoned window left something behind"
            else:
                assert logits is None
                pairs = counters.expert_hits + counters.expert_misses - before
                assert pairs == asked_before_stop * len(PROMPT) * 4
