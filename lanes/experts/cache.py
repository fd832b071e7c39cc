"""The lane's own copies of expert records: a bounded number of slots, and the table that says where each expert lies.

Not here: which experts deserve a slot (policy), the slots' memory (slots), what is computed from records (store). On a
CPU lane slots are private memory, so that budget, policy and counters are real there too.

    turn(touched)     between windows: what has arrived, the policy's plan, its drops and copies, all at once
    pause(touched)    between windows: what has arrived, and the drops that were planned while the window ran
    think()           while the next window runs: copies of what is admitted; the policy, over what the last touched;
                      once the window has read the table, also what `pause` would bring into it
    settle()          between windows: whatever `pause` has put off

Invariant: `addresses[layer, expert]` is the slot of a resident expert, else its place in the shared region; both hold
the same bytes. The table changes in `turn`, `pause`, `settle`, `lend` and `give` only, which the engine calls between
windows, and in `think` where it is told that nobody reads it any more. An admitted expert is resident from the first of
them that finds its copy done: at once where copying is synchronous, windows later where it runs beside them. Its slot
is its own from the beginning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lanes.counters import Counters
from lanes.experts.policy import Budget, Ints, Plan, Policy, State, Touched
from lanes.experts.slots import Arrival, HostSlots, Mark, Slots
from shared_experts.manifest import ExpertsInfo


class Region(Protocol):
    """What the cache needs of an attached region."""

    def record_address(self, layer: int, expert: int) -> int:
        """Where the record of an expert lies, for whoever reads the slots."""


@dataclass(frozen=True, slots=True)
class Cached:
    """How many experts of each layer are resident, of how many."""

    by_layer: tuple[int, ...] = ()
    layer_experts: int = 0


@dataclass(frozen=True, slots=True)
class _Thought:
    """What a window is to be thought about with: things as they were at its end."""

    touched: Callable[[], Touched]
    policy: Policy
    budget: Budget
    unused: npt.NDArray[np.bool_]  # [N]


_NO_KEYS = np.empty(0, np.int64)
_NO_PLAN = Plan(_NO_KEYS, _NO_KEYS)


class ExpertCache:
    """Slots for as many records as the budget holds; 0 is allowed and keeps nothing."""

    def __init__(
        self,
        region: Region,
        info: ExpertsInfo,
        budget_bytes: int,
        policy: Policy,
        counters: Counters,
        slots: Slots | None = None,
        swap_bytes: int | None = None,
    ) -> None:
        """`slots` has room for the budget; without it: private memory."""
        layers, experts, record_bytes = info.layers, info.experts, info.record_bytes
        self.record_bytes = record_bytes
        self._region = region  # the table holds its addresses
        self._policy = policy
        self._state = State.empty(layers * experts)
        self._counters = counters
        room = slots_of(info, budget_bytes)
        self._slots = HostSlots(room, record_bytes) if slots is None else slots
        self._budget = Budget(room, max(1, (swap_bytes or self._slots.swap_bytes) // record_bytes))
        self._free = list(range(room - 1, -1, -1))  # the lowest slot is taken first
        self._place = np.array([self._slots.address(slot) for slot in range(room)], np.uint64)  # of every slot
        self._away, self._given = 0, False  # of the last slots, and whether somebody has their memory
        self._slot = np.full(layers * experts, -1, np.int64)
        self._coming: list[tuple[Arrival, Ints, Ints]] = []  # copies under way, of keys to slots, the oldest first
        self._due: list[tuple[Mark, Ints, Ints]] = []  # copies that `think` begins
        self._owed: _Thought | None = None
        self._plan = _NO_PLAN  # the policy counts on it, the table does not have it yet
        self._unused = np.zeros(layers * experts, np.bool_)  # made resident, and used by no window since
        # The same by the running window's table, where that has moved on.
        self._unused_then: npt.NDArray[np.bool_] | None = None
        # Of every key, in the region. Records stand at equal distances: one look-up and a multiplication instead of
        # 24,576 calls.
        first = region.record_address(0, 0)
        self.home = first + np.arange(layers * experts, dtype=np.uint64) * np.uint64(record_bytes)
        assert int(self.home[-1]) == region.record_address(layers - 1, experts - 1), "records are not contiguous"
        # Where whoever reads the slots finds both tables at once: addresses, then a byte for each resident key.
        self.table: npt.NDArray[np.uint64] = self._slots.array((table_words(layers * experts),), np.uint64)  # type: ignore[assignment]
        self.addresses, self.resident = split_table(self.table, layers, experts, np.bool_)
        self.addresses.reshape(-1)[:] = self.home
        self.version = 0  # of the table
        counters.cache_budget_bytes = room * record_bytes

    def turn(self, touched: Touched) -> None:
        """The safe point after a window: publishes what has arrived, asks the policy, drops, begins copies."""
        self.pause(lambda: touched)
        self.settle()

    def pause(self, touched: Callable[[], Touched]) -> None:
        """The safe point after a window, made short: what `think` asks `touched` for comes into the next one's table.

        Without `think` meanwhile nothing is lost: the next `pause` thinks first.
        """
        if self._owed is not None:
            self.think()
        unused, self._unused_then = self._unused_then, None
        if unused is None:
            unused = self._unused.copy()
        self._arrive()
        # What is still on its way says that the link is behind: nothing more is asked of it.
        budget = replace(self._budget, swaps=0) if self._coming else self._budget
        self._carry_out()
        self._owed = _Thought(touched, self._policy, budget, unused)

    def think(self, *, unread: bool = False) -> None:
        """What `pause` has put off: copies begin, and the policy makes its plan. `unread`: the window that runs has its
        own copy of the table, so that what comes next into it may come at once."""
        self._begin_copies()
        owed, self._owed = self._owed, None
        if owed is not None:
            self._learn(owed)
        if unread:
            if self._unused_then is None:
                self._unused_then = self._unused.copy()
            self._carry_out()
            self._arrive()

    def _learn(self, owed: _Thought) -> None:
        touched = owed.touched()
        if owed.budget.slots == 0:
            return
        proven = touched.keys[owed.unused[touched.keys]]
        self._unused[proven] = False
        self._counters.cache_admitted_hits += proven.shape[0]
        self._state, self._plan = owed.policy(self._state, touched, owed.budget)

    def settle(self) -> None:
        """Between windows: as after `turn`."""
        self.think()
        self._carry_out()
        self._begin_copies()
        self._arrive()

    def by_layer(self) -> Cached:
        """What people look at; from any thread, so it may be of a table that is being changed."""
        return Cached(tuple(self.resident.sum(axis=1).tolist()), self.resident.shape[1])

    def begin(self, state: State) -> None:
        """Starts from a policy's state instead of from nothing: before the first window, with room for what resides."""
        keys = np.flatnonzero(state.resident)
        assert keys.shape[0] <= len(self._free)
        self._state = state
        self._admit(keys)
        self._begin_copies()
        self._arrive()
        self._counters.cache_used_bytes += keys.shape[0] * self.record_bytes

    def price(self, copy_misses: float) -> None:
        """From here on a copy costs as much as so many misses."""
        self._budget = replace(self._budget, copy_misses=copy_misses)

    @property
    def copy_misses(self) -> float:
        """What a copy costs, as the policy is told."""
        return self._budget.copy_misses

    @property
    def state(self) -> State:
        """What the policy knows."""
        return self._state

    @property
    def room(self) -> int:
        """Slots in all, but for those that are lent or away."""
        return self._budget.slots

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[list[int]]:
        """Slots for another use until the block ends, whatever ends it: free ones, then the least used residents'.

        Between windows only, as `turn`; at most all slots whose copies have arrived. What was in them is not brought
        back: the policy fills them again. What `pause` has put off may be thought about while they are lent.
        """
        self._carry_out()
        self._begin_copies()
        self._arrive()
        self._lose(np.flatnonzero(self.resident.reshape(-1)), count - len(self._free))
        lent = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._room_is(self.room - len(lent))
        try:
            yield lent
        finally:
            self._room_is(self.room + len(lent))
            self._free.extend(lent)

    def give(self) -> None:
        """The spare slots' memory is somebody else's until `take`; between windows, and not while slots are lent.

        The least used experts lose their slots, and others move out of the spare ones.
        """
        self._given = True
        first, going = len(self._place) - self._slots.spare, self._slots.spare - self._away
        if not going:
            return
        self._carry_out()
        self._begin_copies()
        self._arrive()
        held = np.flatnonzero(self._slot >= 0)
        self._lose(held, len(held) - first)
        moving = np.flatnonzero(self._slot >= first)
        places, here = self._place[self._slot[moving]], self.resident.reshape(-1)[moving]
        unused = self._unused[moving] | ~here
        self._drop(moving)
        self._free = [slot for slot in self._free if slot < first]
        slots = np.array([self._free.pop() for _ in moving], np.int64)
        self._slot[moving] = slots
        arrival = self._slots.copy(list(zip(slots.tolist(), places.tolist(), strict=True)))
        self._coming.append((arrival, moving, slots))
        self._slots.give()  # which awaits all copies
        self._arrive()
        self._unused[moving] = unused
        self._away += going
        self._room_is(self.room - going)

    def take(self) -> None:
        """The spare slots are experts' again, as many as can be had; between windows."""
        if not self._given:
            return
        self._given = False
        first = len(self._place) - self._away
        back = range(first, first + self._slots.take())
        self._place[first : back.stop] = [self._slots.address(slot) for slot in back]
        self._free = [*reversed(back), *self._free]
        self._away -= len(back)
        self._room_is(self.room + len(back))

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Nothing is learnt from windows until the block ends, and nothing admitted: they are nobody's."""
        policy = self._policy
        self._policy = lambda state, touched, budget: (state, _NO_PLAN)
        try:
            yield
        finally:
            self._policy = policy

    def address(self, slot: int) -> int:
        """Where a slot lies, for whoever reads it."""
        return int(self._place[slot])

    def mark(self) -> Mark:
        """All that the device has been given so far."""
        return self._slots.mark()

    def fetch(self, copies: Sequence[tuple[int, int]], after: Mark) -> Arrival:
        """Begins to copy records into lent slots: (key, slot) each, once the device is past the mark."""
        return self._slots.copy([(slot, int(self.home[key])) for key, slot in copies], after)

    def slots(self) -> npt.NDArray[np.int64]:
        """The slot of every key, -1 where it has none."""
        return self._slot.copy()

    def _lose(self, keys: Ints, count: int) -> None:
        """The least used `count` of these keys have no slots any more."""
        if count <= 0:
            return
        victims = keys[np.lexsort((keys, self._state.last_used[keys], self._state.uses[keys]))[:count]]
        kept = self._state.resident.copy()
        kept[victims] = False
        self._state = replace(self._state, resident=kept)
        self._drop(victims)
        self._counters.cache_evictions += victims.shape[0]
        self._counters.cache_used_bytes -= victims.shape[0] * self.record_bytes

    def _room_is(self, slots: int) -> None:
        """No plan counts on slots that are away."""
        self._budget = replace(self._budget, slots=slots)
        if self._owed is not None:
            self._owed = replace(self._owed, budget=replace(self._owed.budget, slots=slots))

    def _carry_out(self) -> None:
        """The plan becomes the table's: what is dropped is gone, what is admitted has its slot."""
        plan, self._plan = self._plan, _NO_PLAN
        if plan is _NO_PLAN:
            return
        self._drop(plan.evict)
        self._admit(plan.admit)
        counters = self._counters
        counters.cache_admissions += plan.admit.shape[0]
        counters.cache_evictions += plan.evict.shape[0]
        counters.cache_used_bytes += (plan.admit.shape[0] - plan.evict.shape[0]) * self.record_bytes

    def _admit(self, keys: Ints) -> None:
        """Free slots are the keys'; what the device has been given so far may still read them."""
        if not keys.shape[0]:
            return
        slots = np.array([self._free.pop() for _ in range(keys.shape[0])], np.int64)
        self._slot[keys] = slots
        self._due.append((self._slots.mark(), keys, slots))

    def _begin_copies(self) -> None:
        due, self._due = self._due, []
        for mark, keys, slots in due:
            arrival = self._slots.copy(list(zip(slots.tolist(), self.home[keys].tolist(), strict=True)), mark)
            self._coming.append((arrival, keys, slots))

    def _arrive(self) -> None:
        """Makes resident what has been copied, unless it was dropped on the way."""
        while self._coming and self._coming[0][0].here():
            _, keys, slots = self._coming.pop(0)
            here = self._slot[keys] == slots
            keys, slots = keys[here], slots[here]
            if keys.shape[0]:
                self.addresses.reshape(-1)[keys] = self._place[slots]
                self.resident.reshape(-1)[keys] = True
                self._unused[keys] = True
                self.version += 1

    def _drop(self, keys: Ints) -> None:
        if not keys.shape[0]:
            return
        self._free.extend(self._slot[keys].tolist())
        self._slot[keys] = -1
        self.addresses.reshape(-1)[keys] = self.home[keys]
        self.resident.reshape(-1)[keys] = False
        self._unused[keys] = False
        self.version += 1


def table_words(keys: int) -> int:
    """64-bit words of a table of so many keys."""
    return keys + -(-keys // 8)


def split_table(table: Any, layers: int, experts: int, byte: Any) -> tuple[Any, Any]:
    """(addresses [L, E], resident [L, E] of the dtype `byte`) of a table's words, an array or a tensor: views."""
    keys = layers * experts
    return table[:keys].reshape(layers, experts), table[keys:].view(byte)[:keys].reshape(layers, experts)


def slots_of(info: ExpertsInfo, budget_bytes: int) -> int:
    """How many records a budget holds, at most all of them."""
    return min(budget_bytes // info.record_bytes, info.layers * info.experts)
