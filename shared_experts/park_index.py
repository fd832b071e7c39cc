"""The index of parked conversations: who has which segments, what is there to take back, what goes first. Pure.

    lease ──▶ (lane writes the missing blobs) ──▶ publish ──▶ entry ──▶ pin ──▶ (lane reads) ──▶ unpin
                                                          └──▶ trimmed to a shared root ──▶ dropped

A blob is a run of bytes known by tenant and digest: a page of rows, a checkpoint, a header. Entries share blobs: what
two conversations of a tenant have in common is there once, and what was parked before is not copied again.

Not here: the bytes (park_server), messages (park_messages). Invariants: a segment belongs to one blob or is free; a
blob lives while an entry, a lease or a pin needs it; entries, blobs and the log of removals are bounded; nothing that
is pinned or leased goes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared_experts import limits
from shared_experts.errors import ParkFull, ParkRefused
from shared_experts.park_segments import FreeSegments

Tenant = bytes  # 16 bytes that stand for a tenant's salt
Digest = bytes  # 16 bytes


@dataclass(slots=True, eq=False)
class Blob:
    """Bytes in segments; `users` are the entries, leases and pins that need it."""

    tenant: Tenant
    digest: Digest
    size_bytes: int
    segments: tuple[int, ...]
    users: int = 0
    entries: int = 0
    shared: bool = False  # two entries had it at the same time


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a conversation can be taken up: after so many tokens, which need that many pages."""

    tokens: int
    chain: bytes
    pages: int


@dataclass(slots=True, eq=False)
class Entry:
    """A parked conversation, or what is left of it: `checkpoints` go with `marks`, ascending."""

    number: int
    tenant: Tenant
    header: Blob
    pages: list[Blob]
    marks: list[Mark]
    checkpoints: list[Blob]
    changed: int = 0
    pins: int = 0

    def blobs(self) -> list[Blob]:
        """Everything that it needs."""
        return [*self.pages, *self.checkpoints, self.header]


@dataclass(slots=True)
class _Holder:
    """One connection: the blobs of its lease in order, and what it pinned."""

    leased: list[Blob] = field(default_factory=list)
    pinned: dict[int, list[Entry]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries as they are now, ascending by change, and numbers that are gone; `void`: forget everything first."""

    sequence: int
    entries: tuple[Entry, ...]
    removed: tuple[int, ...]
    void: bool
    more: bool


class ParkIndex:
    """Segments 0..`segments` - 1. Holders are any hashable values."""

    def __init__(self, segments: int, segment_bytes: int) -> None:
        self.segments, self.segment_bytes = segments, segment_bytes
        self._free = FreeSegments(segments)
        self._blobs: dict[tuple[Tenant, Digest], Blob] = {}
        self._whole: OrderedDict[int, Entry] = OrderedDict()  # least recently used first
        self._roots: OrderedDict[int, Entry] = OrderedDict()
        self._by_change: OrderedDict[int, Entry] = OrderedDict()  # ascending `changed`
        self._removed: deque[tuple[int, int]] = deque(maxlen=limits.PARK_REMOVALS)
        self._removed_before = 0  # removals up to this sequence are forgotten
        self._offers: dict[tuple[Tenant, bytes, int], int] = {}  # how many entries offer a mark
        self._holders: dict[object, _Holder] = {}
        self._sequence = self._numbers = 0

    @property
    def used_segments(self) -> int:
        """Segments that belong to a blob."""
        return self._free.touched - self._free.free

    @property
    def touched_segments(self) -> int:
        """Segments that have memory behind them."""
        return self._free.touched

    def __len__(self) -> int:
        return len(self._by_change)

    # --- parking

    def lease(
        self, holder: object, tenant: Tenant, wanted: Sequence[tuple[Digest, int]], *, fresh: int | None = None
    ) -> list[tuple[int, ...] | bool]:
        """For each blob: True where it is there, its segments where it is to be written; False where it is not there
        and its size was 0. `fresh` is how many segments never used before may be taken. Raises ParkFull."""
        held = self._holders.setdefault(holder, _Holder())
        if len(held.leased) + len(wanted) > limits.PARK_BLOBS:
            raise ParkRefused(f"a conversation has at most {limits.PARK_BLOBS} parts")
        fresh = self.segments if fresh is None else fresh
        answers: list[tuple[int, ...] | bool] = []
        for digest, size_bytes in wanted:
            blob = self._blobs.get((tenant, digest))
            if blob is not None and size_bytes in (0, blob.size_bytes):
                answers.append(True)
            elif size_bytes == 0:
                answers.append(False)
                continue
            else:
                before = self._free.touched
                blob = Blob(tenant, digest, size_bytes, self._take(-(-size_bytes // self.segment_bytes), fresh))
                fresh -= self._free.touched - before
                answers.append(blob.segments)
            blob.users += 1
            held.leased.append(blob)
        return answers

    def room(
        self, holder: object, tenant: Tenant, sizes: Sequence[int], *, fresh: int | None = None
    ) -> list[tuple[int, ...]]:
        """Leases segments for blobs whose digests are known only once they were written: `name` tells them."""
        nameless = [(b"", size_bytes) for size_bytes in sizes]
        found = self.lease(holder, tenant, nameless, fresh=fresh)
        return [segments if isinstance(segments, tuple) else () for segments in found]

    def name(self, holder: object, digests: Sequence[Digest]) -> None:
        """The digests of the first nameless blobs of the lease; what is there already keeps no second place."""
        leased = self._holders.get(holder, _Holder()).leased
        nameless = [at for at, blob in enumerate(leased) if not blob.digest]
        if len(digests) > len(nameless):
            raise ParkRefused("more names than blobs without one")
        for at, digest in zip(nameless, digests, strict=False):
            blob = leased[at]
            blob.digest = digest
            there = self._blobs.get((blob.tenant, digest))
            if there is not None and there.size_bytes == blob.size_bytes:
                there.users += 1
                leased[at] = there
                self._let_go(blob)

    def publish(self, holder: object, tenant: Tenant, pages: int, marks: Sequence[Mark]) -> int:
        """What was leased, pages, checkpoints, header, is a conversation from now on; returns its number."""
        leased = self._holders.get(holder, _Holder()).leased
        if len(leased) != pages + len(marks) + 1 or any(blob.tenant != tenant or not blob.digest for blob in leased):
            raise ParkRefused("what was leased is not what is published")
        if len(marks) > limits.PARK_MARKS or not all(0 < m.pages <= pages for m in marks):
            raise ParkRefused("marks that no conversation has")
        blobs = [self._settle(blob) for blob in leased]
        leased.clear()
        self._numbers += 1
        entry = Entry(self._numbers, tenant, blobs[-1], blobs[:pages], list(marks), blobs[pages:-1])
        for blob in blobs:
            blob.entries += 1
            blob.shared |= blob.entries > 1
        for mark in marks:
            self._offer(tenant, mark, 1)
        self._whole[entry.number] = entry
        self._change(entry)
        while len(self) > limits.PARK_ENTRIES and self.evict():
            pass
        return entry.number

    def abandon(self, holder: object) -> None:
        """The lease will not be published."""
        held = self._holders.get(holder)
        if held is not None:
            for blob in held.leased:
                self._let_go(blob)
            held.leased.clear()

    def leave(self, holder: object) -> None:
        """The holder is gone: nothing is leased or pinned by it any more."""
        self.abandon(holder)
        held = self._holders.pop(holder, _Holder())
        for entry in [entry for entries in held.pinned.values() for entry in entries]:
            entry.pins -= 1

    def _settle(self, blob: Blob) -> Blob:
        """The blob under its name; where another lane has published the same bytes meanwhile, that one."""
        there = self._blobs.setdefault((blob.tenant, blob.digest), blob)
        if there is not blob:
            there.users += 1
            self._let_go(blob)
        return there

    # --- taking back

    def pin(self, holder: object, number: int, tenant: Tenant) -> Entry:
        """The entry, which stays whole until `unpin`; raises ParkRefused where there is none of that tenant."""
        entry = self._whole.get(number) or self._roots.get(number)
        if entry is None or entry.tenant != tenant:
            raise ParkRefused("no such conversation")
        entry.pins += 1
        self._holders.setdefault(holder, _Holder()).pinned.setdefault(number, []).append(entry)
        self._used(entry)
        return entry

    def unpin(self, holder: object, number: int) -> None:
        """Once for every `pin`."""
        entries = self._holders.get(holder, _Holder()).pinned.get(number)
        if entries:
            entries.pop().pins -= 1

    def where(self, holder: object, number: int, digests: Iterable[Digest]) -> list[Blob | None]:
        """Blobs of a pinned entry."""
        entries = self._holders.get(holder, _Holder()).pinned.get(number)
        if not entries:
            raise ParkRefused("not pinned")
        mine = {blob.digest: blob for blob in entries[0].blobs()}
        return [mine.get(digest) for digest in digests]

    def changes(self, after: int) -> Changes:
        """What is different since that sequence number, in parts of bounded size."""
        if after and after < self._removed_before:
            return Changes(0, (), (), void=True, more=True)
        found: list[Entry] = []
        marks = 0
        for entry in reversed(self._by_change.values()):
            if entry.changed <= after:
                break
            found.append(entry)
        found.reverse()
        for taken, entry in enumerate(found):
            marks += len(entry.marks) + 1
            if marks > limits.PARK_MARKS_PER_REPLY:
                found, more = found[:taken], True
                break
        else:
            more = False
        until = found[-1].changed if more else self._sequence
        gone = [each for each in self._removed if after < each[0] <= until] if after else []
        if len(gone) > limits.PARK_MARKS_PER_REPLY:
            gone, more = gone[: limits.PARK_MARKS_PER_REPLY], True
            until = gone[-1][0]
            found = [entry for entry in found if entry.changed <= until]
        return Changes(until, tuple(found), tuple(number for _, number in gone), void=False, more=more)

    # --- what goes first

    def evict(self) -> bool:
        """Gives back what is least worth keeping: the least recently used conversation down to what it shares with
        others, and shared roots last. False when everything left is pinned or leased."""
        for entry in self._whole.values():
            if not entry.pins:
                self._trim(entry)
                return True
        for entry in self._roots.values():
            if not entry.pins:
                self._drop(entry)
                return True
        return False

    def forget_fresh(self) -> list[int]:
        """Free segments whose memory may be given back to the host; they are as never used."""
        return self._free.forget_fresh()

    def _trim(self, entry: Entry) -> None:
        shared = 0
        for page in entry.pages:
            if not page.shared:
                break
            shared += 1
        keep = [mark for mark in entry.marks if mark.pages <= shared]
        offered = keep and self._offers[entry.tenant, keep[-1].chain, keep[-1].tokens] > 1
        if not keep or offered:  # another one keeps the same root
            return self._drop(entry)
        for mark in entry.marks[len(keep) :]:
            self._offer(entry.tenant, mark, -1)
        gone = [*entry.pages[keep[-1].pages :], *entry.checkpoints[len(keep) :]]
        entry.pages, entry.marks = entry.pages[: keep[-1].pages], keep
        entry.checkpoints = entry.checkpoints[: len(keep)]
        del self._whole[entry.number]
        self._roots[entry.number] = entry
        self._change(entry)
        self._let_entry_go(gone)

    def _drop(self, entry: Entry) -> None:
        self._whole.pop(entry.number, None)
        self._roots.pop(entry.number, None)
        del self._by_change[entry.number]
        for mark in entry.marks:
            self._offer(entry.tenant, mark, -1)
        self._sequence += 1
        if len(self._removed) == self._removed.maxlen:
            self._removed_before = self._removed[0][0]
        self._removed.append((self._sequence, entry.number))
        # Who begins anew is told what is here in parts, and goes on after each: never so far back that it begins anew.
        while self._by_change and (oldest := next(iter(self._by_change.values()))).changed < self._removed_before:
            self._change(oldest)
        self._let_entry_go(entry.blobs())

    def _let_entry_go(self, blobs: Iterable[Blob]) -> None:
        for blob in blobs:
            blob.entries -= 1
            self._let_go(blob)

    def _let_go(self, blob: Blob) -> None:
        blob.users -= 1
        if not blob.users:
            if self._blobs.get((blob.tenant, blob.digest)) is blob:
                del self._blobs[blob.tenant, blob.digest]
            self._free.give(blob.segments)

    def _take(self, count: int, fresh: int) -> tuple[int, ...]:
        while (taken := self._free.take(count, fresh)) is None:
            if not self.evict():
                raise ParkFull("the park pool is full of what is in use")
        return taken

    def _used(self, entry: Entry) -> None:
        (self._whole if entry.number in self._whole else self._roots).move_to_end(entry.number)

    def _change(self, entry: Entry) -> None:
        self._sequence += 1
        entry.changed = self._sequence
        self._by_change[entry.number] = entry
        self._by_change.move_to_end(entry.number)

    def _offer(self, tenant: Tenant, mark: Mark, by: int) -> None:
        key = (tenant, mark.chain, mark.tokens)
        count = self._offers.get(key, 0) + by
        if count:
            self._offers[key] = count
        else:
            del self._offers[key]
