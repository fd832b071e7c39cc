"""The conversations that a lane remembers: which one a prompt goes on, what stays, what goes.

    begin ──▶ rows ──▶ [checkpoint ──▶ rows …] ──▶ end          one or two run by turns, any number wait
      │ longest known prefix of the tenant:
      │   at a conversation's end: it goes on in place
      └── at a checkpoint: a branch goes on; the conversation itself when it loses little or there is no room

Not here: the order of requests (engine), bytes in the host's pool (parking). The budget and the zeroing are the pool's.
Invariants: a prefix is offered only after the pass that read it has ended; tokens are compared, and only within a
tenant; whatever a cancelled or failed pass has left is taken back to a checkpoint before it, or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laneproto.chain import BLOCK_TOKENS
from lanes import limits
from lanes.counters import Counters
from lanes.state.checkpoint import Checkpoint
from lanes.state.errors import UnknownSlot
from lanes.state.parking import Parking
from lanes.state.pool import Branch, StatePool
from lanes.state.prefixes import Place, PrefixLog
from lanes.state.resident import Resident
from lanes.state.reuse import Ids, least_missed

SMALL_TAIL = 8  # a conversation loses little when no more than this fraction of what is kept is lost


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence that stands after the first `cached_tokens` of its prompt."""

    slot: int
    cached_tokens: int = 0
    restored_tokens: int = 0  # of these, what came from the park pool


class Conversations:
    """Used by the engine's thread alone."""

    def __init__(self, pool: StatePool, counters: Counters, park: Parking | None = None) -> None:
        self.pool, self._counters, self._park = pool, counters, park
        self._residents: dict[int, Resident] = {}  # by slot
        self._clock = 0
        self.log = PrefixLog()
        self._count()

    def begin(self, prompt_ids: Sequence[int], max_tokens: int, tenant: bytes) -> Begun:
        """A sequence with room for `max_tokens` that stands as far in the prompt as anything known reaches."""
        prompt = np.asarray(prompt_ids, np.uint32)
        resident = self._restore(prompt, max_tokens, tenant)
        cached = restored = resident.length if resident else 0
        if resident is None:
            found = self._longest(prompt, tenant)
            resident = self._go_on(*found, max_tokens) if found else self._open(max_tokens, tenant)
            cached = found[1] if found else 0
        self._touch(resident, busy=True)
        self._counters.reused_tokens += cached
        self._tell()
        return Begun(resident.slot, cached, restored)

    def read(self, slot: int, start: int, ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """A pass has ended: these tokens are in the slot's state, from position `start` on."""
        if resident := self._residents.get(slot):
            resident.write(start, ids)

    def checkpoint(self, slot: int) -> None:
        """Keeps the state as it is now, if there is room for it."""
        resident = self[slot]
        if resident.length and resident.length not in resident.checkpoints and self._room_for_checkpoint(resident):
            self._hold(resident, Checkpoint.of(resident.state))
            self._counters.checkpoints += 1
        self._tell()

    def end(self, slot: int) -> None:
        """The generation has ended: the conversation waits where it stands, or where it last stood whole."""
        resident = self[slot]
        positions = resident.positions()
        if not positions:
            self._drop(resident)
            return self._tell()
        if resident.state.broken:
            resident.back_to(positions[-1])
            self._make_room(0, keep=resident)
        self.pool.resize(slot, resident.state.allocated_tokens)
        self._touch(resident, busy=False)
        self._tell()

    def forget(self) -> None:
        """Drops every conversation that waits."""
        for resident in self._waiting():
            self._drop(resident)
        self._tell()

    def background(self, most_bytes: int, *, hurry: bool = False) -> bool:
        """Parks about that many bytes of what waits, what was begun first, then what must go, then the latest; False
        when there is nothing left to do. Without `hurry` nothing is waited for."""
        if self._park is None:
            return False
        gone = [one for one in self._waiting() if one.lent_bytes and not self._park.wants(one, leaving=True)]
        for resident in gone:
            self._drop(resident)
        if gone:
            self._tell()
        wanting = [one for one in self._waiting() if self._park.wants(one, leaving=one.lent_bytes > 0)]
        if wanting:
            begun, leaving = self._park.under_way, [one for one in wanting if one.lent_bytes]
            self._park.step(begun if begun in wanting else (leaving or wanting)[-1], most_bytes, hurry=hurry)
        return bool(wanting)

    def idle(self) -> bool:
        """What can be done while nothing runs, in small steps; False when there is nothing left to do."""
        if self._park is None:
            return False
        if self._park.poll():
            self._tell()
        return self.background(limits.PARK_BYTES_PER_STEP, hurry=True) or self._park.prepare()

    def prefixes(self) -> Iterator[tuple[bytes, int]]:
        """(chain, tokens) of every place where a prompt can be taken up."""
        for resident in self._residents.values():
            for position in resident.positions():
                yield resident.chain_at(position), position

    def __getitem__(self, slot: int) -> Resident:
        try:
            return self._residents[slot]
        except KeyError:
            raise UnknownSlot(slot) from None

    def __contains__(self, slot: int) -> bool:
        return slot in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    # --- which one, and how

    def _longest(self, prompt: Ids, tenant: bytes) -> tuple[Resident, int] | None:
        """What of the tenant's the prompt shares most with; of equals one at its end, then the latest."""
        best: tuple[tuple[int, bool, int], Resident] | None = None
        for resident in self._waiting():
            if resident.tenant == tenant and (position := resident.match(prompt)):
                rank = (position, position == resident.length, resident.used)
                if best is None or rank > best[0]:
                    best = (rank, resident)
        return None if best is None else (best[1], best[0][0])

    def _restore(self, prompt: Ids, max_tokens: int, tenant: bytes) -> Resident | None:
        """A conversation from the park pool, where it has a block more of the prompt than this lane's memory."""
        parked = self._park.find(prompt, tenant) if self._park else None
        here = self._longest(prompt, tenant)
        if self._park is None or parked is None or parked[1] < (here[1] if here else 0) + BLOCK_TOKENS:
            return None
        resident = self._open(max_tokens, tenant)
        if self._park.restore(parked, prompt, resident):
            return resident
        resident.state.broken = True  # half filled: nothing of it may be parked or taken
        self._drop(resident)
        return None

    def _go_on(self, resident: Resident, position: int, max_tokens: int) -> Resident:
        at_end = position == resident.length
        if not at_end and (copy := self._copy(resident, position, max_tokens)) is not None:
            return copy
        resident.busy = True  # nothing below may drop it
        lent = resident.lent_bytes > 0
        self._take_back(resident)
        if lent and at_end:
            self._make_room(0, keep=resident, seat_bytes=self._bytes(max_tokens))
        if not at_end:  # what it goes back to is a checkpoint, so room is made once it has
            self._park_whole(resident)
        if self._park is not None:
            self._park.leave_off(resident)
        if at_end:
            self.checkpoint(resident.slot)  # a next prompt may leave the old one here
        for later in [p for p in resident.checkpoints if p > position]:
            self._release(resident, later)
        resident.back_to(position)
        capacity = max(max_tokens, resident.state.allocated_tokens)
        grown_bytes = self._bytes(capacity) - self._bytes(resident.state.capacity_tokens)
        self._make_room(grown_bytes, keep=resident, seat_bytes=self._bytes(capacity))
        self.pool.resize(resident.slot, capacity)
        return resident

    def _copy(self, source: Resident, position: int, max_tokens: int) -> Resident | None:
        """A new sequence with the source's first tokens; None where the source itself had better go on."""
        branch = source.branch(position)
        needed_bytes = self._bytes(max_tokens) - branch.sharable_bytes() + self._owed_bytes(source, position)
        lost = source.length - position
        if not self._fits(needed_bytes):
            its_bytes = self._bytes(source.state.capacity_tokens)
            its_bytes += len(source.checkpoints) * self.pool.shape.fixed_bytes()
            small = self._park is None and SMALL_TAIL * lost <= position
            if small or needed_bytes + its_bytes > self.pool.budget_bytes:
                return None
            source.busy = True
            made = self._make_room(needed_bytes, keep=source, must=False, seat_bytes=self._bytes(max_tokens))
            source.busy = False
            if not made:
                return None
        copy = self._open(max_tokens, source.tenant, branch)
        copy.take_over(source, position)
        for at, checkpoint in source.checkpoints.items():
            if at <= position:
                self._share(copy, checkpoint)
        self._take_back(source, min(source.lent_bytes, self._held_bytes(source)))
        self._touch(source, busy=False)
        return copy

    def _open(self, max_tokens: int, tenant: bytes, branch: Branch | None = None) -> Resident:
        its_bytes = self._bytes(max_tokens)
        self._make_room(its_bytes - (branch.sharable_bytes() if branch else 0), seat_bytes=its_bytes)
        slot = self.pool.open(max_tokens, branch)
        resident = self._residents[slot] = Resident(slot, self.pool[slot], tenant)
        return resident

    # --- room

    def _bytes(self, tokens: int) -> int:
        return self.pool.bytes(tokens)

    def _fits(self, needed_bytes: int) -> bool:
        return needed_bytes <= self.pool.free_bytes and self.pool.free_slots > 0

    def _make_room(
        self, needed_bytes: int, *, keep: Resident | None = None, must: bool = True, seat_bytes: int = 0
    ) -> bool:
        """Drops conversations, least recently used first, then checkpoints of those that run. With a seat, one that is
        to be parked first may do that while who comes, of `seat_bytes`, has the seat."""
        open_one = keep is None or not must
        busy = [one for one in self._residents.values() if one.busy and one is not keep]  # has the seat by turns
        seat_bytes = min([seat_bytes, *(self._bytes(one.state.capacity_tokens) for one in busy)])
        while needed_bytes > self.pool.free_bytes or (open_one and not self.pool.free_slots):
            if self._gives_way(needed_bytes - self.pool.free_bytes, seat_bytes):
                continue
            running = [r for r in self._residents.values() if r.busy and r.checkpoints]
            if not (must and running):
                break
            self._release(running[-1], least_missed(sorted(running[-1].checkpoints)))
        return needed_bytes <= self.pool.free_bytes and (not open_one or self.pool.free_slots > 0)

    def _gives_way(self, missing_bytes: int, seat_bytes: int) -> bool:
        """One that waits goes, or is on its way from now on; False where none waits."""
        waiting = self._waiting()
        leaving = [one for one in waiting if one.lent_bytes]
        staying = [one for one in waiting if not one.lent_bytes]
        for one in (*leaving, *staying[:1]):
            if self._lend(one, missing_bytes, seat_bytes):
                return True
        # One that is parked costs nothing; else the rest of one that is on its way costs less than a whole one.
        parked = self._park is None or not (staying and self._park.wants(staying[0], leaving=True))
        for one in (*staying[:parked], *leaving, *staying):
            self._drop(one)
            return True
        return False

    def _lend(self, resident: Resident, missing_bytes: int, seat_bytes: int) -> bool:
        """Whether it may stay until it is parked: all that is lent lies in what the seat's next one leaves free."""
        more_bytes = min(missing_bytes, self._held_bytes(resident) - resident.lent_bytes)
        if not self.pool.seats or more_bytes <= 0 or self.pool.lent_bytes + more_bytes > seat_bytes:
            return False
        if self._park is None or not self._park.wants(resident, leaving=True):
            return False
        resident.lent_bytes += more_bytes
        self.pool.lent_bytes += more_bytes
        return True

    def _take_back(self, resident: Resident, but_bytes: int = 0) -> None:
        """Of what was lent to it, all but that."""
        self.pool.lent_bytes -= resident.lent_bytes - but_bytes
        resident.lent_bytes = but_bytes

    def _held_bytes(self, resident: Resident) -> int:
        """What is free once it is gone."""
        alone = sum(checkpoint.holders == 1 for checkpoint in resident.checkpoints.values())
        return self._bytes(resident.state.capacity_tokens) + alone * self.pool.shape.fixed_bytes()

    def _owed_bytes(self, source: Resident, position: int) -> int:
        """Of what was lent to it, what it will not give back once a copy shares its checkpoints up to there."""
        alone = sum(at <= position and one.holders == 1 for at, one in source.checkpoints.items())
        return max(0, source.lent_bytes - self._held_bytes(source) + alone * self.pool.shape.fixed_bytes())

    def _room_for_checkpoint(self, resident: Resident) -> bool:
        """Thins this conversation's checkpoints to their number, and others' before any conversation goes."""
        if len(resident.checkpoints) >= limits.MAX_CHECKPOINTS:
            self._release(resident, least_missed(sorted(resident.checkpoints)))
        size_bytes = self.pool.shape.fixed_bytes()
        for other in (*self._waiting(), resident):
            while size_bytes > self.pool.free_bytes and len(other.checkpoints) > 1:
                self._release(other, least_missed(sorted(other.checkpoints)))
        return size_bytes <= self.pool.free_bytes

    def _waiting(self) -> list[Resident]:
        """Conversations that no generation runs on, least recently used first."""
        return sorted((r for r in self._residents.values() if not r.busy), key=lambda resident: resident.used)

    def _drop(self, resident: Resident) -> None:
        if not resident.state.broken:
            self._park_whole(resident)
        if self._park is not None:
            self._park.leave_off(resident)
        for position in list(resident.checkpoints):
            self._release(resident, position)
        del self._residents[resident.slot]
        self.pool.close(resident.slot)
        self._take_back(resident)
        self._count()

    def _park_whole(self, resident: Resident) -> None:
        """Nothing of it is lost to the host when it leaves this lane's memory, or part of it does."""
        if self._park is not None and self._park.wants(resident, leaving=True):
            while not self._park.step(resident, self.pool.budget_bytes):
                pass

    # --- checkpoints, charged once however many hold them

    def _hold(self, resident: Resident, checkpoint: Checkpoint) -> None:
        self.pool.charge(self.pool.shape.fixed_bytes())
        self._share(resident, checkpoint)

    def _share(self, resident: Resident, checkpoint: Checkpoint) -> None:
        checkpoint.holders += 1
        resident.checkpoints[checkpoint.position] = checkpoint

    def _release(self, resident: Resident, position: int) -> None:
        checkpoint = resident.checkpoints.pop(position)
        checkpoint.holders -= 1
        if not checkpoint.holders:
            checkpoint.erase()
            self.pool.charge(-self.pool.shape.fixed_bytes())
            self._take_back(resident, min(resident.lent_bytes, self._held_bytes(resident)))

    def _touch(self, resident: Resident, *, busy: bool) -> None:
        self._clock += 1
        resident.busy, resident.used = busy, self._clock
        self._count()

    def _tell(self) -> None:
        self._count()
        self.log.residents = len(self._residents)
        parked = dict.fromkeys(self._park.mirror.prefixes(), Place.PARKED) if self._park else {}
        live = dict.fromkeys(self.prefixes(), Place.LIVE)
        self.log.publish({key: place for key, place in (parked | live).items() if key[1] >= BLOCK_TOKENS})

    def _count(self) -> None:
        self._counters.state_used_bytes = self.pool.reserved_bytes
        self._counters.state_budget_bytes = self.pool.budget_bytes
