"""Puts a lane together: pack, region, expert cache, model, states, engine, and a self-test before anything listens.

What computes differs between devices: `cpu_parts` is here, that of a GPU in `lanes.startup_cuda`. Not here: the door
(server) and the process's life (process).
Invariant: a `Lane` that exists has passed its self-test (`selftest`); whatever was opened on the way to a failure
is closed again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from lanes import limits, selftest
from lanes.affinity import gather
from lanes.chunk import of_host
from lanes.config import LaneConfig
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.drafts.vocabulary import read as read_vocabulary
from lanes.engine import Engine
from lanes.errors import StartError
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import Cached, ExpertCache
from lanes.experts.keeper import ProfileKeeper
from lanes.experts.policy import Policy
from lanes.experts.profile import PackExperts
from lanes.experts.store import ExpertStore
from lanes.experts.trace import TraceHeader, TraceWriter, trace_path
from lanes.grammar import Grammars
from lanes.models import load_model
from lanes.models.near import Near
from lanes.parts import Opened, Parts
from lanes.runner import ModelRunner
from lanes.state.conversations import Conversations
from lanes.state.parking import Parking
from lanes.state.pool import StatePool
from lanes.state.prefixes import PrefixLog
from lanes.state.snapshot import Identity as SnapshotIdentity
from lanes.tolerance import BF16, FP32
from lanes.wire import Identity
from shared_experts.attach import AttachedRegion, attach
from shared_experts.golden import read as read_golden
from shared_experts.owner import run_directory
from shared_experts.pack import Pack

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """Everything that serves, ready to start; `resources` closes it."""

    engine: Engine
    identity: Identity
    prefixes: PrefixLog
    region: AttachedRegion
    resources: contextlib.ExitStack
    cached: Callable[[], Cached]  # from any thread


class _WaitLog:
    """Says why there is no region yet: at once, then every few seconds while the reason changes."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, reason: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + limits.REGION_WAIT_LOG_S
            _log.info("region_wait", reason=reason)


def cpu_parts(opened: Opened) -> Parts:
    """A lane whose every part computes in host memory; its cache is private memory."""
    config, counters, info = opened.config, opened.counters, opened.pack.manifest.experts
    kernel = opened.kernel(config.cores)
    cache = ExpertCache(opened.region, info, config.vram_budget_bytes, opened.cache_policy, counters)
    store = ExpertStore(kernel, cache, counters)
    model = load_model(
        opened.pack,
        store,
        ngram_cache_bytes=config.ngram_cache_bytes,
        counters=counters,
        drafts=opened.draft_layer,
    )
    if config.prefill_routing == "vram":
        model.near = Near(lambda layer: torch.from_numpy(cache.resident[layer]), counters)
    context_tokens = opened.context_tokens(model.spec)
    shape = model.state_shape.with_int8() if config.kv_int8 else model.state_shape
    states = StatePool(shape, config.state_budget_bytes, slots=limits.MAX_RESIDENTS, paged=True)
    states.budget_bytes += states.bytes(context_tokens)  # one active generation of full length, and those that wait
    return Parts(kernel, store, model, states, context_tokens, cache, of_host(config.prefill_chunk_rows))


def _maker(device: str) -> Callable[[Opened], Parts]:
    """What makes a device's parts; a CPU lane loads nothing of a GPU's."""
    if device == "cpu":
        return cpu_parts
    from lanes.startup_cuda import cuda_parts

    return cuda_parts


def assemble(config: LaneConfig, policy: Policy = adaptive) -> Lane:
    """A lane as configured, its expert cache after `policy`; raises StartError or the typed errors of the parts."""
    with contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        pack = stack.enter_context(Pack.open(config.pack))
        manifest = pack.manifest
        region = stack.enter_context(
            attach(
                config.owner,
                manifest,
                limits.REGION_ATTACH_S,
                on_wait=_WaitLog(),
            )
        )
        attached_s = time.monotonic()
        _log.info("region_attached", seconds=round(attached_s - began_s, 3), bytes=region.mapped_bytes)
        # From here on, not only once the model is loaded: a new owner that found no holder would build a second region.
        run_directory(config.region_socket.parent)
        stack.enter_context(region.lend(config.region_socket))

        info = manifest.experts
        counters = Counters()
        torch.set_num_threads(len(config.cores))
        opened = Opened(config, pack, region, policy, counters, stack)
        parts = _maker(config.device)(opened)
        kernel, experts, model, states = parts.kernel, parts.experts, parts.model, parts.states
        keeper = None
        if config.profiles is not None and policy is adaptive:
            of = PackExperts(manifest.fingerprint, info.layers, info.experts)
            keeper = ProfileKeeper(config.profiles, config.name, of, parts.cache)
            stack.callback(keeper.close)
        _log.info("prefill_chunk", rows=parts.chunk.rows, reason=parts.chunk.reason)
        if config.prefill_routing != "exact" and model.near is None:
            raise StartError(f"--prefill-routing: {config.prefill_routing!r} is not served on this device")
        spec, context_tokens, draft_layer = model.spec, parts.context_tokens, opened.draft_layer
        visitor_tokens = min(context_tokens, states.tokens_in(config.state_budget_bytes))
        park = None
        if config.park is not None:
            origin = SnapshotIdentity.of(manifest.fingerprint, states.shape)
            routing = b"" if config.prefill_routing == "exact" else config.prefill_routing.encode()
            park = Parking(config.park, origin, counters, clock=time.monotonic, routing=routing, carrier=parts.carrier)
            stack.callback(park.close)
            park.ready()
        conversations = Conversations(states, counters, park)
        runner = ModelRunner(model, states, experts, conversations)
        golden = read_golden(config.pack, manifest.fingerprint)
        tested = selftest.run(
            runner,
            selftest.Experts(kernel, info, region.record_address, region.record),
            spec.vocab,
            golden,
            FP32 if model.dtype == torch.float32 and not config.kv_int8 else BF16,
        )
        _log.info("self_test_passed", compared=tested)
        windows_up_to = parts.windows_up_to(runner)
        counters.restart()
        if keeper is not None:
            keeper.start()
        if config.trace_routing is not None:
            trace = TraceWriter(
                trace_path(config.trace_routing, config.name),
                TraceHeader(info.layers, info.experts, manifest.fingerprint),
            )
            stack.callback(trace.close)
            experts.recorder = trace.record
        _log.info(
            "lane_loaded",
            seconds=round(time.monotonic() - attached_s, 3),
            isa=kernel.isa,
            threads=kernel.threads,
            context_tokens=context_tokens,
            cache_bytes=counters.cache_budget_bytes,
            state_bytes=states.budget_bytes,
        )
        vocabulary = None
        if draft_layer and config.draft_vocabulary is not None:
            vocabulary = read_vocabulary(config.draft_vocabulary, spec.vocab)
            model.narrow_guesses(vocabulary)
        drafts = config.drafts if config.drafts is not None else limits.MAX_DRAFTS * draft_layer
        _log.info(
            "drafts", most=drafts, layer=draft_layer, vocabulary=len(vocabulary) if vocabulary else spec.vocab,
            at_once=model.chains,
        )  # fmt: skip
        engine = Engine(
            runner,
            counters,
            prefill_chunk_rows=parts.chunk.rows,
            windows_up_to=windows_up_to,
            visitor_tokens=visitor_tokens,
            steered=model.near is not None,
            drafter=Drafter(drafts, runner.guess if draft_layer else None, vocabulary, chains=model.chains),
            grammars=Grammars(config.pack / "tokenizer.json", spec.vocab, spec.eos_ids),
            on_start=lambda: settle_thread(config),
        )
        identity = Identity(
            name=config.name,
            incarnation=os.urandom(16),
            pid=os.getpid(),
            device=config.device,
            model_name=manifest.name,
            architecture=manifest.architecture,
            fingerprint=manifest.fingerprint,
            vocab_size=spec.vocab,
            context_tokens=context_tokens,
            eos_ids=spec.eos_ids,
            expert_format=info.format,
            region_bytes=region.header.total_bytes,
            visitor_tokens=visitor_tokens,
            approximations=config.approximations,
        )
        return Lane(engine, identity, conversations.log, region, stack.pop_all(), parts.cache.by_layer)


def settle_thread(config: LaneConfig) -> None:
    """First thing in the engine's thread: torch's helpers are started, then the thread takes its own core.

    In this order: helpers started from a pinned thread would all share its core. On a GPU lane whoever else
    there is (the door, the driver's threads) joins the engine there, which waits for the device most of the time;
    torch's helpers sleep while windows run.
    """
    if config.pinned and config.device != "cpu":
        gather(config.cores[0])
    torch.set_num_threads(len(config.cores))
    side = torch.ones(1 << 10, 1 << 8)
    torch.mm(side, side.t())
    side.add_(1.0)
    if config.pinned:
        os.sched_setaffinity(0, {config.cores[0]})
