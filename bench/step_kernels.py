"""How long the GPU is in which kernel of a decode step, replayed graphs included, as torch's profiler tells it.

    experts     jobs, quantising, gate-up, down and combine: resident experts and those read over the link, together,
                and, inside down, waiting until the CPU's share is done
    attention   index, choice and attention itself, without their projections
    rest        everything else: projections, mixers, DeltaNet, router, head

Kernels of two parts that share a name count as rest. Not here: time in which no kernel runs (the step's less the sum).
Invariant: where the profiler saw no kernel there are no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lanes.kernels import attention, combine, experts, index, jobs, post

SHOWN = 40  # kernels by name

_MODULES = {
    "experts": (jobs, post, experts, combine),
    "attention": (attention, index),
}


def names() -> dict[str, str]:
    """The part of every kernel that has a name of its own."""
    import lanes.kernels.deltanet as other

    taken = {name for name in vars(other) if _is_kernel(other, name)}
    return {
        name: part
        for part, modules in _MODULES.items()
        for module in modules
        for name in vars(module)
        if _is_kernel(module, name) and name not in taken
    }


def _is_kernel(module: object, name: str) -> bool:
    """Whether a module's own name is a jitted function of that module."""
    function = getattr(getattr(module, name), "fn", None)
    return getattr(function, "__module__", None) == getattr(module, "__name__", "")


def device_us(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds by kernel while `run()` ran; empty where none was seen."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {one.key: one.self_device_time_total for one in seen.key_averages() if one.self_device_time_total > 0}


def grouped(times_us: Mapping[str, float], steps: int) -> dict[str, object]:
    """Milliseconds of a step by part and by kernel, the longest first."""
    part_of, parts = names(), dict.fromkeys((*_MODULES, "rest"), 0.0)
    for name, spent in times_us.items():
        parts[part_of.get(name, "rest")] += spent
    longest = sorted(times_us.items(), key=lambda one: -one[1])[:SHOWN]
    return {
        "milliseconds": {part: round(spent / 1e3 / steps, 4) for part, spent in parts.items()} if times_us else None,
        "kernels": {name: round(spent / 1e3 / steps, 4) for name, spent in longest},
    }
