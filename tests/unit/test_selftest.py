"""The self-test: passes on a healthy lane of any instruction set; finds one wrong bit in records, kernel or model."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.cache_baselines import least_recently_used
from lanes import golden, selftest
from lanes.counters import Counters
from lanes.errors import SelfTestFailed, StartError
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ISAS, ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.runner import ModelRunner
from lanes.state.pool import StatePool
from shared_experts.pack import Pack
from tests.fakes.processes import tiny_pack


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def record(pack):
    with Pack.open(pack) as opened:
        return golden.make(opened, 1)


class Bent:
    """A kernel with one wrong bit in every row it makes, from a given call on."""

    def __init__(self, kernel, after=0, value=None):
        self.kernel, self.after, self.value, self.calls = kernel, after, value, 0
        self.combine = kernel.combine

    def run(self, addresses, row_offsets, row_index, x, out):
        self.kernel.run(addresses, row_offsets, row_index, x, out)
        self.calls += 1
        if self.calls > self.after:
            if self.value is None:
                out.view(np.int32)[:, 0] ^= 1
            else:
                out[:, 0] = self.value


@contextlib.contextmanager
def lane(pack, *, isa=None, bend=lambda kernel: kernel, cache_bytes=1 << 20):
    """Everything of a lane that a self-test needs, over the records of the pack's file."""
    with Pack.open(pack) as opened:
        info = opened.manifest.experts
        records = golden.PackRecords(opened.experts_path, info)
        native = ExpertKernel(info.layout, threads=1, isa=isa)
        kernel = bend(native)
        counters = Counters()
        cache = ExpertCache(records, info, cache_bytes, least_recently_used, counters)
        store = ExpertStore(kernel, cache, counters)
        model = load_model(opened, store)
        runner = ModelRunner(model, StatePool(model.state_shape, model.state_shape.bytes(64)), store)
        yield runner, selftest.Experts(kernel, info, records.record_address, records.record), model.spec.vocab, cache
        native.close()


def test_a_healthy_lane_passes_with_every_instruction_set(pack, record):
    assert len(record.experts) == 5  # four layers and the draft layer
    assert record.steps
    best = ISAS[ExpertKernel.best_isa()]
    for isa in [name for name, number in ISAS.items() if number <= best]:
        with lane(pack, isa=isa) as (runner, experts, vocab, _):
            assert "as recorded" in selftest.run(runner, experts, vocab, record)


@pytest.mark.parametrize("experts_format", ["f32", "q8", "q4g32"])
def test_without_a_record_it_says_so_in_every_format(tmp_path, experts_format):
    with lane(tiny_pack(tmp_path, experts_format)) as (runner, experts, vocab, _):
        assert "no golden record" in selftest.run(runner, experts, vocab, None)


def test_the_record_is_the_same_every_time(pack, record):
    with Pack.open(pack) as opened:
        assert golden.make(opened, 1) == record


def test_one_wrong_bit_of_a_record_is_found(pack, record, tmp_path):
    one = record.experts[2]
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in pack.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    with Pack.open(bad) as opened:
        info = opened.manifest.experts
    with (bad / "experts.bin").open("r+b") as file:  # digests are not read here: as if the region had been forged
        file.seek((one.layer * info.experts + one.expert) * info.record_bytes + info.layout.down_scales)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with (
        lane(bad) as (runner, experts, vocab, _),
        pytest.raises(SelfTestFailed, match=rf"expert {one.expert} of layer 2 answers other bits"),
    ):
        selftest.run(runner, experts, vocab, record)


@pytest.mark.parametrize("known", [True, False])
def test_one_wrong_bit_of_the_kernel_is_found(pack, record, known):
    with (
        lane(pack, bend=Bent) as (runner, experts, vocab, _),
        pytest.raises(SelfTestFailed, match="other bits"),
    ):
        selftest.run(runner, experts, vocab, record if known else None)


def test_nan_from_the_kernel_is_found(pack, record):
    with (
        lane(pack, bend=lambda kernel: Bent(kernel, after=len(record.experts), value=np.nan)) as (
            runner,
            experts,
            v,
            _,
        ),
        pytest.raises(SelfTestFailed, match="not finite"),
    ):
        selftest.run(runner, experts, v, record)


def test_a_cached_record_that_differs_from_the_region_is_found(pack, record):
    with lane(pack) as (runner, experts, vocab, cache):
        turn = cache.turn

        def spoil(touched):
            turn(touched)
            cache._slots._buffer[:: cache.record_bytes] ^= 0x55

        cache.turn = spoil
        with pytest.raises(SelfTestFailed):
            selftest.run(runner, experts, vocab, record)


def test_the_whole_model_is_compared(pack, record):
    """Right experts, wrong dense weights."""
    with lane(pack) as (runner, experts, vocab, _):
        forward = runner.forward

        def shifted(window, stopped):
            logits = forward(window, stopped)
            return None if logits is None else np.roll(logits, 1, axis=1)

        runner.forward = shifted
        with pytest.raises(SelfTestFailed, match="off the golden record"):
            selftest.run(runner, experts, vocab, record)


def test_logits_that_change_from_one_run_to_the_next_are_found(pack, record):
    with lane(pack) as (runner, experts, vocab, _):
        forward, calls = runner.forward, []

        def drifting(window, stopped):
            calls.append(1)
            return forward(window, stopped) * np.float32(1 + 1e-6 * (len(calls) > 7))

        runner.forward = drifting
        with pytest.raises(SelfTestFailed, match="the second time"):
            selftest.run(runner, experts, vocab, record)


def test_a_record_of_another_shape_is_refused(pack, record):
    with lane(pack) as (runner, experts, vocab, _):
        strange = replace(record, experts=(replace(record.experts[0], expert=vocab),))
        with pytest.raises(SelfTestFailed, match="there is none"):
            selftest.run(runner, experts, vocab, strange)
        with pytest.raises(SelfTestFailed, match="vocabulary"):
            selftest.run(runner, experts, vocab, replace(record, prompt=(vocab,)))


LOGITS = np.array([0.0, 4.0, 3.9, -2.0], np.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ([0, 0, 0, 0], None),
        ([0, 0.3, 0, 0], None),  # inside the tolerance of 0.1 * 4
        ([0, 0.5, 0, 0], "off the golden record"),
        ([0, -0.2, 0.1, 0], None),  # another best token, but its lead was small
        ([0, np.nan, 0, 0], "off the golden record"),
    ],
)
def test_a_step_is_compared_with_its_tolerance(change, reason):
    wanted, logits = selftest.shorten(LOGITS), LOGITS + np.array(change, np.float32)
    if reason is None:
        selftest.check_step(0, wanted, logits, 0.1)
    else:
        with pytest.raises(SelfTestFailed, match=reason):
            selftest.check_step(0, wanted, logits, 0.1)


def test_the_best_token_must_be_the_recorded_one_where_its_lead_is_large():
    wanted = selftest.shorten(np.array([0.0, 4.0, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, -3.5], np.float32))
    logits = np.array([0.0, 4.0, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 4.01], np.float32)  # a token that is not kept
    with pytest.raises(SelfTestFailed):
        selftest.check_step(0, wanted, logits, 0.1)


def test_a_host_too_small_for_the_model_makes_no_record(pack):
    with Pack.open(pack) as opened:
        golden.check_memory(opened, "MemAvailable: 2097152 kB\n")
        golden.check_memory(opened, "")
        with pytest.raises(StartError, match="memory"):
            golden.check_memory(opened, "MemAvailable: 1048576 kB\n")


def test_questions_lie_in_the_vocabulary_and_differ():
    for vocab in (20, 512, 248_320):
        questions = [selftest.question(vocab, number) for number in range(golden.PROMPTS)]
        assert all(0 <= id < vocab for question in questions for id in question)
        assert len(set(questions)) == golden.PROMPTS
