"""The least time of a decode step or a prompt that the measured rates allow; definitions are those of the results.

    step     dense and resident bytes at the GPU's copy rate, then misses over link and cores at once, at the rates
             measured while both work, and the measured handshake. On a CPU lane: all bytes at the cores' read rate.
    prompt   the bytes that must cross the link (a CPU lane: that the cores read), once, at its rate alone

Pure. Invariant: a bound counts no byte and no wait that was not measured, so nothing real beats it but caches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates in bytes per second (`ceilings`); of a GPU only where there is one."""

    cpu_read: float
    hbm_copy: float | None = None
    link: float | None = None
    link_beside_cpu: float | None = None
    cpu_beside_link: float | None = None


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Of one decode step, on average."""

    dense: float
    resident: float
    missed: float


def step_s(moved: StepBytes, rates: Ceilings, handshake_s: float = 0.0) -> float:
    """Seconds."""
    if rates.hbm_copy is None:
        return (moved.dense + moved.resident + moved.missed) / rates.cpu_read
    assert rates.link_beside_cpu is not None
    assert rates.cpu_beside_link is not None
    both = rates.link_beside_cpu + rates.cpu_beside_link
    return (moved.dense + moved.resident) / rates.hbm_copy + moved.missed / both + handshake_s


def prompt_s(expert_bytes: float, rates: Ceilings) -> float:
    """Seconds."""
    return expert_bytes / (rates.cpu_read if rates.link is None else rates.link)
