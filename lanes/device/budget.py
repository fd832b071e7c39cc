"""How a lane's VRAM budget is divided: everything has its bytes before the first is taken; experts get what is left.

    budget = reserve + context + dense weights + conversation + workspace + expert tables + slots x record

What a long pass's activations take beyond the workspace is lent by the last slots while it runs. The budget counts all
VRAM of the process as the driver reports it, so the CUDA context with its loaded kernels is part of it. Not here:
asking a device anything. Pure.

Invariant: the parts and the slots of a plan never sum to more than the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from lanes.errors import VramTooSmall

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Needs:
    """What a lane holds in VRAM besides experts, in bytes."""

    context_bytes: int  # the CUDA context, kernels, captured graphs, cuBLAS
    dense_bytes: int  # weights of everything but routed experts
    state_bytes: int  # of the conversation that runs
    workspace_bytes: int  # activations of every pass but long ones
    table_bytes: int  # what experts take whether they are cached or not: addresses, counters, rows
    lent_bytes: int = 0  # more activations, of the longest pass: there has to be room, which experts have meanwhile

    @property
    def total_bytes(self) -> int:
        """Their sum."""
        return self.context_bytes + self.dense_bytes + self.state_bytes + self.workspace_bytes + self.table_bytes


@dataclass(frozen=True, slots=True)
class VramPlan:
    """A budget, divided."""

    budget_bytes: int
    reserve_bytes: int  # never used
    needs: Needs
    record_bytes: int
    slots: int
    spare: int  # of the slots: so many are away while a long pass runs

    @property
    def cache_bytes(self) -> int:
        """Of expert records."""
        return self.slots * self.record_bytes

    @property
    def left_bytes(self) -> int:
        """What is neither used nor reserved: less than a record, or every expert is cached."""
        return self.budget_bytes - self.reserve_bytes - self.needs.total_bytes - self.cache_bytes

    @property
    def most_allocated_bytes(self) -> int:
        """What the allocator may take in all: everything but the context and the reserve."""
        return self.budget_bytes - self.reserve_bytes - self.needs.context_bytes


def plan(budget_bytes: int, reserve_bytes: int, needs: Needs, record_bytes: int, records: int) -> VramPlan:
    """The most slots that fit, up to one for each of `records`. VramTooSmall where not even the other parts do."""
    room_bytes = budget_bytes - reserve_bytes - needs.total_bytes
    if room_bytes < needs.lent_bytes:
        parts = (
            ("dense weights", needs.dense_bytes), ("one conversation", needs.state_bytes),
            ("workspace", needs.workspace_bytes + needs.lent_bytes), ("expert tables", needs.table_bytes),
            ("CUDA", needs.context_bytes), ("reserve", reserve_bytes),
        )  # fmt: skip
        listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts)
        raise VramTooSmall(
            f"--vram-budget: {_mib(budget_bytes)} MiB are {_mib(needs.lent_bytes - room_bytes)} MiB too few before any "
            f"expert is cached (MiB: {listed})"
        )
    slots = min(room_bytes // record_bytes, records)
    spare = -(-max(0, needs.lent_bytes - (room_bytes - slots * record_bytes)) // record_bytes)
    return VramPlan(budget_bytes, reserve_bytes, needs, record_bytes, slots, spare)


def _mib(size_bytes: int) -> int:
    """Whole MiB, rounded up."""
    return -(-size_bytes // _MIB)
