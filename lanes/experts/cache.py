"""The lane's own copies of expert records: a bounded buffer of slots, and the table that says where each expert lies.

Not here: which experts deserve a slot (policy) or what is computed from them (store). On a CPU lane the buffer is
private memory, so that budget, policy and counters are real there too.

Invariant: `addresses[layer, expert]` is the slot of a resident expert, else its place in the shared region; both hold
the same bytes. The table changes in `turn` only, which the engine calls between windows.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lanes import limits
from lanes.counters import Counters
from lanes.experts.policy import Budget, Policy, State, Touched
from shared_experts.manifest import ExpertsInfo


class Region(Protocol):
    """What the cache needs of an attached region."""

    def record_address(self, layer: int, expert: int) -> int:
        """Where the record of an expert lies in this process."""


class ExpertCache:
    """Slots for as many records as the budget holds; 0 is allowed and keeps nothing."""

    def __init__(
        self,
        region: Region,
        info: ExpertsInfo,
        budget_bytes: int,
        policy: Policy,
        counters: Counters,
    ) -> None:
        layers, experts, record_bytes = info.layers, info.experts, info.record_bytes
        self.record_bytes = record_bytes
        self._region = region  # the table holds its addresses
        self._policy = policy
        self._state = State.empty(layers * experts)
        self._counters = counters
        slots = min(budget_bytes // record_bytes, layers * experts)
        self._budget = Budget(slots, max(1, limits.SWAP_BYTES_PER_WINDOW // record_bytes))
        self._buffer = np.frombuffer(mmap.mmap(-1, max(1, slots) * record_bytes, mmap.MAP_PRIVATE), np.uint8)
        self._free = list(range(slots - 1, -1, -1))  # the lowest slot is taken first
        self._slot = np.full(layers * experts, -1, np.int64)
        self._unused = np.zeros(layers * experts, np.bool_)  # admitted, and used by no window since
        # Records stand at equal distances: one look-up and a multiplication instead of 24,576 calls.
        first = region.record_address(0, 0)
        self._home = first + np.arange(layers * experts, dtype=np.uint64) * np.uint64(record_bytes)
        assert int(self._home[-1]) == region.record_address(layers - 1, experts - 1), "records are not contiguous"
        self.addresses = self._home.copy().reshape(layers, experts)  # uint64 [layers, experts]
        self.resident = np.zeros((layers, experts), np.bool_)
        counters.cache_budget_bytes = slots * record_bytes

    def turn(self, touched: Touched) -> None:
        """The safe point after a window: asks the policy, drops, copies, publishes the table."""
        if self._budget.slots == 0:
            return
        proven = touched.keys[self._unused[touched.keys]]
        self._unused[proven] = False
        self._state, plan = self._policy(self._state, touched, self._budget)
        addresses, resident = self.addresses.reshape(-1), self.resident.reshape(-1)
        for key in plan.evict.tolist():
            self._free.append(int(self._slot[key]))
            self._slot[key] = -1
            addresses[key] = self._home[key]
            resident[key] = False
        for key in plan.admit.tolist():
            slot = self._free.pop()
            address = self._buffer.ctypes.data + slot * self.record_bytes
            ctypes.memmove(address, int(self._home[key]), self.record_bytes)
            self._slot[key] = slot
            addresses[key] = address
            resident[key] = True
        self._unused[plan.evict] = False
        self._unused[plan.admit] = True
        counters = self._counters
        counters.cache_admitted_hits += proven.shape[0]
        counters.cache_admissions += plan.admit.shape[0]
        counters.cache_evictions += plan.evict.shape[0]
        counters.cache_used_bytes += (plan.admit.shape[0] - plan.evict.shape[0]) * self.record_bytes

    def slots(self) -> npt.NDArray[np.int64]:
        """The slot of every key, -1 where it is not resident."""
        return self._slot.copy()
