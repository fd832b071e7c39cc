"""One measuring process of `bench.decode`: a job comes as JSON on standard input, its figures leave on standard output.

    ceilings   what the memories deliver, and how many dense bytes a step reads
    handshake  on a GPU: what the CPU's answers add to a step (`handshake`)
    adaptive   one conversation along the walk: the lane as it is, under its cache policy
    forced     the same stretch at hit rates that are forced (`forced`)
    kernels    on a GPU: a few steps more, by kernel (`step_kernels`)
    drafted    what drafts bring at injected acceptances (`drafted`), told as it is found

A process each, so that a lane's memory, device and threads are its own. Not here: the region (bench.decode holds it).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench import ceilings, drafted
from bench.cache_policy import SWAPS, profile, recorded, run
from bench.forced import Held, hottest
from bench.own_lane import Answered, OwnLane, started
from bench.step_parts import timed
from bench.synthetic import measure
from bench.synthetic.walk import Walk, walk
from lanes.config import LaneConfig, parse
from lanes.counters import Counters
from lanes.drafts.policy import Beliefs
from lanes.experts.adaptive import adaptive
from lanes.experts.native import ExpertKernel
from lanes.logs import configure_logging
from lanes.models.qwen4_exp.spec import Spec
from shared_experts.attach import AttachedRegion, attach
from shared_experts.pack import Pack

MOST_PASSES = 40  # until a forced set is in the cache
ATTACH_S = 60.0
PROFILED_STEPS = 32

Job = dict[str, object]
Figures = dict[str, object]


def options_of(job: Job) -> list[str]:
    """The lane's options."""
    given = job["options"]
    assert isinstance(given, list)
    return [str(option) for option in given]


def config_of(job: Job) -> LaneConfig:
    """The same, parsed."""
    return parse(options_of(job), os.environ, frozenset(os.sched_getaffinity(0)))


def number(job: Job, name: str) -> int:
    """A whole number of the job."""
    value = job[name]
    assert isinstance(value, int)
    return value


def walk_of(job: Job) -> Walk:
    """The pack's walk."""
    return walk(number(job, "vocabulary"), number(job, "topics"))


@contextlib.contextmanager
def own_kernel(config: LaneConfig) -> Iterator[tuple[Pack, AttachedRegion, ExpertKernel, int | None]]:
    """The pack, its region, and the kernel on the cores that the lane gives it, the calling thread's first; from here
    on this thread is where the lane's engine would be."""
    with Pack.open(config.pack) as pack, attach(config.owner, pack.manifest, ATTACH_S) as region:
        cores = config.cores
        if config.device != "cpu":
            from lanes.experts.gpu.start import cores_of  # with kernels, which only a GPU lane needs

            engine_core, cores = cores_of(config.cores)
            if config.pinned:
                os.sched_setaffinity(0, {engine_core})
        pinned = cores if config.pinned else None
        kernel = ExpertKernel(pack.manifest.experts.layout, cores=pinned, threads=len(cores))
        try:
            yield pack, region, kernel, pinned[0] if pinned else None
        finally:
            kernel.close()


def rates(job: Job) -> Figures:
    """Ceilings, and the dense bytes of a step: what one token multiplies with, as the lane holds it."""
    config = config_of(job)
    with own_kernel(config) as (pack, region, kernel, core):
        found = ceilings.measure(region, kernel, config.device, core)
        parameters = Spec.from_config(pack.manifest.config).dense_parameters_per_token()
    return {
        "bytes_per_s": {name: round(rate) for name, rate in asdict(found).items() if rate is not None},
        "dense_bytes": parameters * (4 if config.device == "cpu" else 2),
        "cores": len(config.cores),
    }


def handshakes(job: Job) -> Figures:
    """Of a window of every decoder layer."""
    from bench import handshake  # with kernels, which only a GPU lane needs
    from lanes.device import cuda

    device = cuda.start().device
    with own_kernel(config_of(job)) as (pack, region, kernel, core):
        chosen = Spec.from_config(pack.manifest.config).experts_per_token
        return handshake.measure(region, pack.manifest.experts, chosen, kernel, device, core)


def walked(job: Job) -> Figures:
    """A warm-up, the measured stretch, and another one with its parts timed."""
    config, order = config_of(job), walk_of(job)
    start, prompt, warm, tokens = (number(job, name) for name in ("start", "prompt", "warm", "tokens"))
    trace = Path(str(job["trace"]))
    with started([*options_of(job), "--trace-routing", str(trace)]) as lane:
        lane.ask(order.stretch(start, prompt), warm)
        seen = prompt + warm
        answer = lane.ask(order.stretch(start, seen), tokens)
        right = sum(a == b for a, b in zip(answer.ids, order.stretch(start + seen, tokens), strict=True))
        with timed(config.device) as parts:
            split = lane.ask(order.stretch(start, seen + tokens), max(2, tokens // 2))
        steps = split.steps_ns
    layers, experts, keys = measure.decode_keys(trace)
    counted = answer.decode
    return {
        **figures(answer, number(job, "choices")),
        "milliseconds": parts.milliseconds(len(steps), sum(steps) / 1e6 / len(steps)),
        "follows_the_walk": round(right / tokens, 4),
        "hottest_tenth_takes": round(measure.skew(keys, layers * experts), 3),
        "cache": {
            "budget_bytes": counted.cache_budget_bytes,
            "admissions_per_step": round(counted.cache_admissions / len(answer.steps_ns), 2),
            "admitted_used_again": round(counted.cache_admitted_hits / max(1, counted.cache_admissions), 3),
            "replayed": replayed(trace, counted, layers * experts, number(job, "record_bytes")),
        },
    }


def replayed(trace: Path, counted: Counters, pairs: int, record_bytes: int) -> Figures | None:
    """The recorded routing under the lanes' policy and a fixed set, both as `bench.cache_policy` counts."""
    slots = counted.cache_budget_bytes // record_bytes
    if not 0 < slots < pairs:
        return None
    replay = recorded(trace)
    ours, fixed = (run(replay, policy, slots, SWAPS)["hit_rate"] for policy in (adaptive, profile(replay)))
    return {"slots": slots, "adaptive": ours, "fixed": fixed, "ratio": round(ours / max(fixed, 1e-9), 3)}


def figures(answer: Answered, choices: int) -> Figures:
    """Speed, hits and bytes of an answer's steps; a step makes so many choices of an expert."""
    counted = answer.experts
    steps = max(1, (counted.expert_hits + counted.expert_misses) // choices)  # that were counted
    return {
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "step_ms_median": round(statistics.median(answer.steps_ns) / 1e6, 3),
        "steps": len(answer.steps_ns),
        "hit_rate": round(counted.expert_hits / max(1, counted.expert_hits + counted.expert_misses), 4),
        "resident_bytes": round(counted.expert_hit_bytes / steps),
        "missed_bytes": round(counted.expert_miss_bytes / steps),
        "missed_bytes_by_the_cpu": round(counted.expert_cpu_bytes / steps),
    }


def at_forced_rates(job: Job) -> Figures:
    """Every rate, ascending, with the set that this very stretch makes hottest: what a rate needs, the next one has.

    Where `left_s` run out before the next rate would have been measured, that one and all after it are left out.
    """
    clock = time.monotonic
    until_s = clock() + float(str(job["left_s"]))
    order, trace = walk_of(job), Path(str(job["trace"]))
    start, prompt, tokens = (number(job, name) for name in ("start", "prompt", "tokens"))
    asked = job["rates"]
    assert isinstance(asked, list)
    held = Held(number(job, "pairs"))
    ids = order.stretch(start, prompt)
    points: list[Figures] = []
    with started([*options_of(job), "--trace-routing", str(trace)], held) as lane:
        lane.ask(ids, tokens)
        _, _, keys = measure.decode_keys(trace)
        uses = measure.uses(keys, len(held.wanted))
        for rate in asked:
            wanted = hottest(uses, float(rate))
            held.want(wanted)
            passes = settle(lane, held, ids, tokens, lambda: clock() < until_s)
            answer = lane.ask(ids, tokens) if clock() < until_s else None
            if answer is None:
                break
            points.append(
                {
                    "forced_rate": float(rate), **figures(answer, number(job, "choices")), "held_experts": len(wanted),
                    "held_bytes": len(wanted) * number(job, "record_bytes"), "not_held": held.missing,
                    "passes_before": passes,
                }
            )  # fmt: skip
    return {"points": points}


def by_kernel(job: Job) -> Figures:
    """A warm-up, then some steps under the profiler, which slows them down: shares are told, not speed."""
    from bench.step_kernels import device_us, grouped  # kernels, which only a GPU lane needs

    order = walk_of(job)
    start, prompt, warm, tokens = (number(job, name) for name in ("start", "prompt", "warm", "tokens"))
    with started(options_of(job)) as lane:
        lane.ask(order.stretch(start, prompt), warm)
        ids = order.stretch(start, prompt + warm)
        steps = min(tokens, PROFILED_STEPS)
        return grouped(device_us(lambda: lane.ask(ids, steps)), steps)


def with_drafts(job: Job) -> Figures:
    """A stretch with an oracle's drafts, at hit rates that the experts in the cache give, in the order asked.

    What there is no time for in `left_s` is left out.
    """
    until_s = time.monotonic() + float(str(job["left_s"]))

    def left_s() -> float:
        return until_s - time.monotonic()

    order, start, prompt = walk_of(job), number(job, "start"), number(job, "prompt")
    trace, pairs, shares, at = Path(str(job["trace"])), number(job, "pairs"), job["shares"], job["at"]
    assert isinstance(shares, list)
    assert isinstance(at, list)
    rounds, tokens, held = number(job, "rounds"), number(job, "tokens"), Held(pairs)
    with started([*options_of(job), "--trace-routing", str(trace)], held) as lane:
        layer = lane.lane.engine.drafter.layer
        stretch = drafted.Stretch(lane, layer, order, start, prompt, tokens, number(job, "record_bytes"))
        stretch.answer(0, 1.0, Beliefs())
        _, _, keys = measure.decode_keys(trace)
        uses = measure.uses(keys, pairs)
        uses[number(job, "decoder_pairs") :] = 0  # the draft layer's experts are pinned
        found: Figures = {}
        # Wrong drafts use what the stretch does not: in VRAM is everything that there is room for.
        room = lane.lane.engine.status().counters.cache_budget_bytes // number(job, "record_bytes")
        whole = np.arange(number(job, "decoder_pairs")) if room >= pairs else hottest(uses, 1.0)
        for rate in at:
            name = "in_vram" if rate == 1.0 else f"forced_{rate:.0%}".rstrip("%")
            held.want(whole if rate == 1.0 else hottest(uses, rate))
            settle(lane, held, order.stretch(start, prompt), tokens, lambda: left_s() > 0)
            say(name, {"rate": rate, "held": int(held.wanted.sum()), "not_held": held.missing})
            at_rate = drafted.measured(stretch, shares, rounds, say, left_s)
            found[name] = {"rate": rate, "not_held": held.missing, **at_rate}
        return found


def say(what: str, found: object) -> None:
    """On standard error, as it is found: what was measured is known even where the rest is cut."""
    print(f"{what}: {json.dumps(found)}", file=sys.stderr, flush=True)


def settle(
    lane: OwnLane, held: Held, ids: list[int], tokens: int, go_on: Callable[[], bool] = lambda: True
) -> int:  # fmt: skip
    """Asks until all wanted experts are in the cache, or no more get in, or `go_on` says no; returns how often."""
    for passes in range(MOST_PASSES):
        before = held.missing
        if not before or not go_on():
            return passes
        lane.ask(ids, tokens)
        if held.missing == before:
            return passes + 1
    return MOST_PASSES


KINDS: dict[str, Callable[[Job], Figures]] = {
    "ceilings": rates,
    "handshake": handshakes,
    "adaptive": walked,
    "forced": at_forced_rates,
    "kernels": by_kernel,
    "drafted": with_drafts,
}


def main() -> int:
    """Does one job."""
    configure_logging(json_lines=True, lane="bench")
    job: Job = json.load(sys.stdin)
    os.sched_setaffinity(0, config_of(job).cores)  # every thread from here on inherits it, as in a lane's process
    sys.stdout.write(json.dumps(KINDS[str(job["kind"])](job)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
