"""Answers of the real model with f32 experts: the same ids with drafts and without, whoever drafts and however wrongly.

Prompts of several chunks, contexts across the indexer's budget and block edges, an eos in the answer's way, stop ids,
penalties, temperatures; oracle and adversary as proposers, the model's own draft layer, and copies of the prompt.
"""

import asyncio
import contextlib
import dataclasses

import pytest
import torch

from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.engine import Engine
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.outbox import End, Outbox
from lanes.request import Request, Sampling
from lanes.runner import ModelRunner
from lanes.state.pool import StatePool
from shared_experts.pack import Pack
from tests.fakes.drafts import convinced, oracle, scripted
from tests.fakes.processes import tiny_pack
from tests.integration.test_lane_residency import Bytes

PROMPT = (5, 9, 300, 11, 7, 7, 401, 12, 3, 88, 5, 9, 300, 11, 7, 7, 2, 88, 5, 9, 300, 11, 7, 7, 8, 8, 31)


@dataclasses.dataclass
class Rig:
    runner: ModelRunner
    store: ExpertStore
    counters: Counters

    async def answer(self, drafter, request, chunk=10):
        engine = Engine(self.runner, self.counters, prefill_chunk_rows=chunk, drafter=drafter)
        engine.start()
        outbox = Outbox(asyncio.get_running_loop(), 1024)
        engine.submit(request, outbox)
        events = []
        while not events or not isinstance(events[-1], End):
            events += await asyncio.wait_for(outbox.take(), 60)
        engine.stop()
        assert events[-1].reason in ("length", "stop"), events[-1]
        return events[:-1], events[-1]


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        pack = stack.enter_context(Pack.open(tiny_pack(tmp_path_factory.mktemp("pack"), "f32")))
        info, counters = pack.manifest.experts, Counters()
        kernel = ExpertKernel(info.layout, threads=1)
        stack.callback(kernel.close)
        store = ExpertStore(
            kernel, ExpertCache(Bytes(pack), info, 20 * info.record_bytes, adaptive, counters), counters
        )
        model = load_model(pack, store, counters=counters, drafts=True)
        pool = StatePool(model.state_shape, model.state_shape.bytes(256))
        yield Rig(ModelRunner(model, pool, store), store, counters)
    torch.set_num_threads(threads)


SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=30),
    "hot": Sampling(temperature=0.8, seed=3, top_p=0.95),
    "hot, no cut": Sampling(temperature=1.2, seed=8, presence_penalty=0.5, logit_bias=((7, 2.0),)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_the_same_ids_whoever_drafts(rig, sampling):
    request = Request("r", PROMPT, 44, sampling, frozenset({1}), logprobs=True, top_logprobs=3)
    plain, end = await rig.answer(None, request)
    ids = [t.id for t in plain]
    assert end.counters.decode_windows == len(ids) - 1
    drafters = {
        f"oracle of {drafts}, every {every}th wrong": scripted(oracle(PROMPT, ids, drafts, lambda p: p % every == 0))  # noqa: B023
        for drafts in (1, 2, 3)
        for every in (1, 2, 3, 100)
    }
    drafters["draft layer"] = Drafter(3, rig.runner.guess, beliefs=convinced())
    drafters["copies"] = Drafter(3, beliefs=convinced())
    for name, drafter in drafters.items():
        tokens, again = await rig.answer(drafter, request, chunk=7)
        assert [t.id for t in tokens] == ids, name
        assert (again.reason, again.completion_tokens) == (end.reason, end.completion_tokens), name
        assert max(abs(a.logprobs.chosen - b.logprobs.chosen) for a, b in zip(tokens, plain, strict=True)) < 1e-3
        assert again.counters.decode_windows + again.counters.right_draft_tokens == len(ids) - 1
        if "100th" in name:
            assert again.counters.decode_windows <= len(ids) // 2 + 2
        if name == "draft layer":
            assert again.counters.draft_tokens > 20


async def test_a_replay_goes_on_with_the_same_ids(rig):
    sampling = Sampling(temperature=0.9, seed=12, frequency_penalty=0.4)
    ids = [t.id for t in (await rig.answer(None, Request("r", PROMPT, 40, sampling)))[0]]
    for cut in (1, 6, 23):
        request = Request("r", (*PROMPT, *ids[:cut]), 40, sampling, replayed_tokens=cut)
        for drafter in (
            Drafter(3, rig.runner.guess, beliefs=convinced()),
            scripted(oracle(PROMPT, ids, 3, lambda p: p % 4 == 0)),
        ):
            tokens, _ = await rig.answer(drafter, request)
            assert [t.id for t in tokens] == ids[cut:]


async def test_rejected_rows_do_not_count_for_the_cache(rig):
    """What the policy is told of a window is what its accepted rows chose."""
    request = Request("r", PROMPT, 24)
    seen = []
    rig.store.recorder = seen.append
    try:
        plain, _ = await rig.answer(None, request)
        alone, ids = seen[:], [t.id for t in plain]
        for drafts, wrong in ((3, lambda p: True), (1, lambda p: True)):
            seen.clear()
            await rig.answer(scripted(oracle(PROMPT, ids, drafts, wrong)), request)
            assert [(t.window_rows, t.keys.tolist(), t.rows.tolist()) for t in seen] == [
                (t.window_rows, t.keys.tolist(), t.rows.tolist()) for t in alone
            ]
        seen.clear()
        await rig.answer(scripted(oracle(PROMPT, ids, 3, lambda p: p % 3 == 0)), request)
        assert sum(t.rows.sum() for t in seen) == sum(t.rows.sum() for t in alone), "each accepted row once"
        assert all(t.rows.max() <= t.window_rows for t in seen)
    finally:
        rig.store.recorder = None
