"""What computes in a lane on a GPU: the device, the region pinned for it, the budget divided, model and experts.

Imported only where a GPU was asked for. Not here: what is the same on every device (`lanes.startup`).
Invariant: what the lane takes of VRAM was planned before the first weight is loaded, and stays inside the budget.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import structlog
import torch

from lanes import limits
from lanes.chunk import Chunk, Layer, of_device, rows_that_fit
from lanes.device import cuda
from lanes.device.arena import Arena
from lanes.device.budget import Needs, VramPlan, plan
from lanes.device.carrier import DeviceCarrier
from lanes.device.host import PinnedHost
from lanes.device.pin import PinnedRegion
from lanes.device.pool_pins import PoolPins
from lanes.device.registered import Registered
from lanes.device.side import Side
from lanes.device.staging import Staging, size_for
from lanes.errors import CudaUnavailable
from lanes.experts.cache import ExpertCache
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.pace import SLOTS, LayerPace, measure
from lanes.experts.gpu.prompt import Means
from lanes.experts.gpu.rates import Rates, copy_misses
from lanes.experts.gpu.reading import Reading
from lanes.experts.gpu.share import Found
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.gpu.start import cores_of, start_share
from lanes.experts.native import ExpertKernel
from lanes.models import load_model
from lanes.models.load import DTYPES, dense_bytes
from lanes.models.near import Near
from lanes.models.qwen4_exp.gpu.model import GpuQwen4Exp
from lanes.models.qwen4_exp.gpu.served import check_served, on_this_gpu
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.pace import FEW_ROWS, MANY_ROWS, pace_of, timed
from lanes.parts import Opened, Parts
from lanes.quiet import quiet
from lanes.reading import Preludes
from lanes.runner import Runner
from lanes.state.pool import StatePool
from shared_experts.attach import AttachedRegion
from shared_experts.manifest import ExpertsInfo, Manifest
from shared_experts.row_reader import cache_bytes

_log = structlog.get_logger(__name__)


class DeviceRegion:
    """The region's records as the device addresses them."""

    def __init__(self, region: AttachedRegion, pinned: PinnedRegion) -> None:
        self._region, self._pinned = region, pinned

    def record_address(self, layer: int, expert: int) -> int:
        """Where the device reads the record of an expert."""
        found = self._pinned.device_address(self._region.record_address(layer, expert))
        assert found is not None, "the region is not mapped"
        return found


@on_this_gpu()
def cuda_parts(opened: Opened) -> Parts:
    """A lane on the first GPU that this process sees; raises CudaUnavailable or VramTooSmall."""
    config, counters, info = opened.config, opened.counters, opened.pack.manifest.experts
    device = cuda.start()
    _log.info("gpu", name=device.name, capability=device.capability, bytes=device.total_bytes, used=device.used_bytes)
    pinned = opened.stack.enter_context(PinnedRegion(opened.region.base_address, opened.region.mapped_bytes))
    _log.info("region_pinned", mode=pinned.mode, seconds=round(pinned.seconds, 3), bytes=pinned.size_bytes)
    if pinned.mode != "mapped":
        raise CudaUnavailable(f"--device cuda: {device.name} cannot register read-only host memory; try a newer driver")
    spec = Spec.from_config(opened.pack.manifest.config)
    context_tokens = opened.context_tokens(spec)
    check_served(spec, info, context_tokens)
    shape = spec.state_shape(DTYPES[opened.pack.manifest.dense_dtype], drafts=opened.draft_layer)
    seat_bytes = shape.bytes(context_tokens)
    staging_bytes = size_for(shape)
    records = DeviceRegion(opened.region, pinned)
    with quiet(config.region_socket.parent):
        measured = _layer_pace(records, info, spec.experts_per_token, device.device)
    divided, chunk = divide(opened, spec, seat_bytes + staging_bytes, measured)
    cuda.limit(device, divided.most_allocated_bytes)
    slots = DeviceSlots(divided.slots, info.record_bytes, device.device, divided.spare)
    cache = ExpertCache(records, info, divided.cache_bytes, opened.cache_policy, counters, slots)
    experts = GpuExperts(cache, info, spec.experts_per_token, counters, device.device)
    kernel, rates = _share(opened, experts, cache, measured)
    inner = load_model(
        opened.pack,
        experts,
        device=device.device,
        ngram_cache_bytes=max(config.ngram_cache_bytes, _rows_ahead_bytes(opened.pack.manifest, chunk.rows)),
        counters=counters,
        drafts=opened.draft_layer,
    )
    assert isinstance(inner, Qwen4Exp)
    # The sequence that runs has its state in VRAM; those that wait lie in host memory, as do checkpoints.
    budget_bytes = seat_bytes + config.state_budget_bytes
    arena, side = _arena(opened, budget_bytes), Side(device.device)
    staging = Staging(side, staging_bytes)
    host = PinnedHost(arena, side, staging)
    model = GpuQwen4Exp(inner, experts, context_tokens, host=host)
    pins, cores = PoolPins(Registered()), config.cores if config.pinned else ()
    carrier = DeviceCarrier(side, staging, pins, seat=model.take_seat, stays=arena.__contains__, cores=cores)
    opened.stack.callback(carrier.close)
    if config.prefill_routing == "vram":
        model.near = inner.near = Near(experts.resident, counters)
    # What the driver counts beside torch's part: the context, kernels and graphs (on a GPU of this lane alone).
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    reserved_bytes = torch.cuda.memory_reserved()
    _log.info(
        "windows_captured", allocated=torch.cuda.memory_allocated(), reserved=reserved_bytes,
        beside_torch=total_bytes - free_bytes - reserved_bytes, planned_beside_torch=limits.CUDA_CONTEXT_BYTES,
    )  # fmt: skip
    states = StatePool(model.state_shape, budget_bytes, slots=limits.MAX_RESIDENTS, host=host, branch=model.branch)
    most_rows = min(MANY_ROWS, chunk.rows, context_tokens // 2)

    @on_this_gpu()
    def windows_up_to(runner: Runner) -> int:
        with quiet(config.region_socket.parent):
            return _reading(opened, experts, cache, measured, rates, runner, spec.vocab, most_rows)

    return Parts(kernel, experts, model, states, context_tokens, cache, chunk, windows_up_to, carrier)


def _arena(opened: Opened, size_bytes: int) -> Arena:
    """Of states that wait, all of it from the start."""
    began_s = time.monotonic()
    registered = Registered()
    opened.stack.callback(registered.close)
    arena = Arena(size_bytes, registered, opened.config.cores if opened.config.pinned else ())
    opened.stack.callback(arena.close)
    seconds = round(time.monotonic() - began_s, 3)
    _log.info("state_memory", bytes=arena.size_bytes, pinned=arena.pinned, seconds=seconds)
    return arena


def _rows_ahead_bytes(manifest: Manifest, chunk_rows: int) -> int:
    """Of n-gram caches, so that rows of the chunk that runs and of the next one are read ahead, none of them later."""
    each = [cache_bytes(table, 2 * chunk_rows * len(table.head_offsets)) for table in manifest.ngram]
    return len(each) * max(each, default=0)


def _layer_pace(records: DeviceRegion, info: ExpertsInfo, chosen: int, device: torch.device) -> LayerPace:
    """Of the link and of a layer's experts; what it takes of VRAM is back before anything is planned."""
    slots = DeviceSlots(SLOTS, info.record_bytes, device)
    first = np.uint64(records.record_address(0, 0))
    every = first + np.arange(info.layers * info.experts, dtype=np.uint64) * np.uint64(info.record_bytes)
    found = measure(slots, every, info, chosen, device)
    del slots
    torch.cuda.empty_cache()
    _log.info("layer_pace", **dataclasses.asdict(found))
    return found


def _reading(
    opened: Opened, experts: GpuExperts, cache: ExpertCache, layer: LayerPace, rates: Rates, runner: Runner, vocab: int,
    most_rows: int,
) -> int:  # fmt: skip
    """Measures this lane's pace; from here on passes are fed by it. Rows up to which decode windows read a prompt."""
    info, counters, preludes = opened.pack.manifest.experts, opened.counters, Preludes()
    experts.paced = preludes.told
    few_rows = max(limits.MAX_WINDOW_TOKENS + 1, min(FEW_ROWS, most_rows // 2))
    with cache.at_rest():
        window, few = (timed(runner, counters, vocab, rows) for rows in (limits.MAX_WINDOW_TOKENS, few_rows))
        if most_rows > limits.PROMPT_ROWS_IN_PLACE:
            cache.give()  # now, and not below: its memory is no activations'
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        many = timed(runner, counters, vocab, most_rows, repeats=1) if most_rows > few_rows else few
        activation_bytes = torch.cuda.max_memory_allocated() - before_bytes
    pace = pace_of(
        window, few, many, link_bytes_per_s=layer.link_bytes_per_s, record_bytes=info.record_bytes,
        miss_s=1e-6 / (1 / rates.link_us + 1 / max(rates.cpu_us, 1e-3)),
        expert_row_s=layer.expert_row_s * (info.layers - info.draft_layers),
    )  # fmt: skip
    reading = Reading(cache, info, experts.chosen, pace, preludes)
    rows, choice = reading.windows_up_to()
    experts.feeding = reading.feeding
    if opened.config.prefill_routing != "exact":
        # Steered rows miss next to nothing, and decode windows are never steered.
        rows, experts.feeding = 0, lambda _: Means(ahead=False, slots=limits.RING_SLOTS)
    _log.info(
        "prompt_reading", windows_up_to=rows, next=choice.reason, pace=dataclasses.asdict(pace),
        ring_slots=experts.feeding(most_rows).slots, activation_bytes_of_a_row=activation_bytes // many.rows,
    )  # fmt: skip
    return rows


def _share(
    opened: Opened, experts: GpuExperts, cache: ExpertCache, pace: LayerPace
) -> tuple[ExpertKernel, Rates]:  # fmt: skip
    """The CPU takes its share of misses from here on; its kernel, which is nobody else's while a window runs."""
    config, info = opened.config, opened.pack.manifest.experts
    _, cores = cores_of(config.cores)
    kernel = opened.kernel(cores)
    copy_us = info.record_bytes / pace.link_bytes_per_s * 1e6
    started = start_share(
        experts,
        cache,
        kernel,
        opened.region.record_address(0, 0),
        lambda way, reason: _log.warning("doorbell_refused", way=way, reason=reason),
        cores[0] if config.pinned else None,
        measuring=quiet(config.region_socket.parent),
        copy_us=copy_us,
    )
    opened.stack.callback(started.share.close)
    _log.info(
        "expert_share",
        threads=kernel.threads,
        rates=dataclasses.asdict(started.rates),
        cpu_of_misses=started.share.counts.tolist(),
    )
    cache.price(copy_misses(copy_us, started.rates))
    _log.info("cache_price", copy_us=round(copy_us, 1), copy_misses=round(cache.copy_misses, 2))

    def found(now: Found) -> None:
        line = now.line
        cache.price(copy_misses(copy_us, dataclasses.replace(started.rates, cpu_us=line.each_us, link_us=now.link_us)))
        _log.info(
            "expert_split", bias=now.bias, link_us=round(now.link_us, 1), cpu_us=round(line.each_us, 1),
            cpu_start_us=round(line.start_us, 1), cpu_of_misses=now.counts.tolist(),
            copy_misses=round(cache.copy_misses, 2),
        )  # fmt: skip

    started.share.on_split = found
    return kernel, started.rates


def divide(opened: Opened, spec: Spec, state_bytes: int, pace: LayerPace) -> tuple[VramPlan, Chunk]:
    """A lane's budget, its conversation takes `state_bytes`, and its chunk; VramTooSmall where there is no room."""
    config, info = opened.config, opened.pack.manifest.experts
    # Of a prompt's chunk three tensors as large as its streams live at once, and the allocator may lose a third as much
    # again to pieces; the rest is bounded by slices.
    row_bytes = 4 * 4 * spec.streams * spec.hidden
    needs = Needs(
        context_bytes=limits.CUDA_CONTEXT_BYTES,
        dense_bytes=dense_bytes(opened.pack, drafts=opened.draft_layer),
        state_bytes=state_bytes,
        workspace_bytes=limits.CUDA_WORKSPACE_BYTES,
        table_bytes=16 * info.layers * info.experts,
    )
    free_bytes = config.vram_budget_bytes - limits.VRAM_RESERVE_BYTES - needs.total_bytes
    # Of a layer, what the cache has no room for beside the longest chunk that fits.
    cached = max(0, free_bytes - rows_that_fit(free_bytes, row_bytes) * row_bytes) // info.record_bytes
    absent = max(0, info.layers * info.experts - cached) / info.layers
    layer = Layer(absent * info.record_bytes / pace.link_bytes_per_s, pace.expert_row_s)
    chunk = of_device(config.prefill_chunk_rows, free_bytes, row_bytes, layer)
    rows = max(chunk.rows, limits.MAX_WINDOW_TOKENS)
    in_place = min(rows, limits.PROMPT_ROWS_IN_PLACE)
    needs = dataclasses.replace(
        needs, workspace_bytes=needs.workspace_bytes + in_place * row_bytes, lent_bytes=(rows - in_place) * row_bytes
    )
    found = plan(
        config.vram_budget_bytes, limits.VRAM_RESERVE_BYTES, needs, info.record_bytes, info.layers * info.experts
    )
    _log.info(
        "vram_budget", bytes=found.budget_bytes, reserve=found.reserve_bytes, context=needs.context_bytes,
        dense=needs.dense_bytes, state=needs.state_bytes, workspace=needs.workspace_bytes, tables=needs.table_bytes,
        cache=found.cache_bytes, slots=found.slots, spare=found.spare,
    )  # fmt: skip
    return found, chunk
