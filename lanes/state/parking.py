"""Parking: conversations go to the host's pool piece by piece between windows, and come back on any of its lanes.

    step: pages and checkpoints that the pool has not yet ──▶ header, last ──▶ published
    back: header ──▶ its tokens are the prompt's ──▶ pages and checkpoint into a fresh sequence, digest by digest

Not here: which conversation (conversations), how bytes get there (carrier), the pool's index
(shared_experts.park_index), what a snapshot is. A lane without a pool, or whose owner is away, works on without.
Invariants: only what does not change is copied (a conversation that waits); what comes back is verified whole before
anything may go on from it; after any failure the prompt is read instead; segments are given up only once nothing that
this lane began is under way to them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
import torch

from laneproto.chain import EMPTY, chain
from lanes import limits
from lanes.counters import Counters
from lanes.state import snapshot
from lanes.state.carrier import Carrier, Fixed, Job, Part, Rows, Segments
from lanes.state.errors import SnapshotRefused
from lanes.state.mirror import ParkMirror
from lanes.state.resident import Resident
from lanes.state.reuse import Ids, most_useful
from lanes.state.snapshot import Header, Identity, SavedMark
from shared_experts.errors import ParkError, ParkFull
from shared_experts.park_client import ParkClient, Parked

ROOM_PAGES = 32  # asked for at once
BATCHES_IN_A_HURRY = 8  # under way beside the one that is sent
READY_S = 2.0
STEP_S = 0.002  # that a step in a hurry waits: a request that arrives meanwhile waits as long

_log = structlog.get_logger(__name__)


class Parking:
    """Used by the engine's thread alone."""

    def __init__(
        self, path: Path, identity: Identity, counters: Counters, *, clock: Callable[[], float], routing: bytes = b"",
        carrier: Carrier | None = None,
    ) -> None:  # fmt: skip
        """`routing` names how prompts are read where that is approximate: other states are then not seen, nor these."""
        self._path, self._identity, self._counters, self._clock = path, identity, counters, clock
        self._routing, self._carrier = routing, carrier or Carrier()
        self._hurry = True
        self._client: ParkClient | None = None
        self._retry_s = self._polled_s = self._full_until_s = -1e9
        self._job: tuple[Resident, int, Iterator[int]] | None = None  # who, its length, the rest of the work
        self.mirror = ParkMirror()

    # --- to the pool

    def wants(self, resident: Resident, *, leaving: bool = False) -> bool:
        """Whether to park this conversation. One that the pool has dropped again is parked anew only when it leaves."""
        if resident.length < limits.LEAST_PARKED_TOKENS or not self._usable() or not self._places(resident):
            return False
        if self._clock() < self._full_until_s:
            return False
        generation, number = resident.parked_as
        there = self._client is None or generation == self._client.generation
        if leaving:
            there = there and resident.parked <= self.mirror.tokens(number)
        return not there or resident.parked < resident.length

    def _places(self, resident: Resident) -> int:
        """In how many places it could be taken up, had it seven parts in eight of the pool; 0: it is too large."""
        memory = self._client.memory if self._client is not None else None
        if memory is None:
            return snapshot.MOST_MARKS
        shape = resident.state.shape
        return max(0, memory.total_bytes * 7 // 8 - shape.growing_bytes(resident.length)) // max(1, shape.fixed_bytes())

    @property
    def under_way(self) -> Resident | None:
        """The conversation of which a part is in the pool already."""
        return self._job[0] if self._job else None

    def step(self, resident: Resident, most_bytes: int, *, hurry: bool = True) -> bool:
        """Parks about that many bytes more of it; True when it is parked, or cannot be now. Without `hurry` nothing is
        waited for: what is under way goes on beside."""
        began_ns, self._hurry = time.monotonic_ns(), hurry
        try:
            if self._job is None or self._job[:2] != (resident, resident.length):
                self.leave_off()
                self._job = (resident, resident.length, self._park(resident))
            for copied in self._job[2]:
                most_bytes -= copied
                if most_bytes <= 0:
                    return False
            self._job = None
            return True
        except ParkFull as full:  # of what others are at: the connection, and what is registered, are as good as before
            _log.info("park_failed", code=full.code, reason=str(full))
            self._full_until_s = self._clock() + limits.PARK_RETRY_S
            self._give_up()
            return True
        except ParkError as error:
            self._failed(error)
            return True
        finally:
            self._counters.park_ns += time.monotonic_ns() - began_ns

    def leave_off(self, resident: Resident | None = None) -> None:
        """The conversation goes on, or goes: what was begun for it is given up."""
        if self._job is not None and resident in (None, self._job[0]):
            self._give_up()

    def _give_up(self) -> None:
        self._job = None
        self._carrier.settle()
        if self._client is not None:
            try:
                self._client.abandon()
            except ParkError as error:
                self._failed(error)

    def _park(self, resident: Resident) -> Iterator[int]:
        """Yields bytes looked at; the owner knows the conversation once it is through."""
        client, tenant, state = self._connected(), snapshot.tenant_key(resident.tenant, self._routing), resident.state
        tokens = resident.length
        known = self._still_there(client, tenant, resident)
        settled = state.settled // limits.PAGE_TOKENS
        rows = Rows.of(state, range(len(known), -(-tokens // limits.PAGE_TOKENS)), tokens, tokens)
        places = deque[Segments]()
        for first in range(0, len(rows), ROOM_PAGES):
            places += client.room(tenant, [part.size_bytes for part in rows[first : first + ROOM_PAGES]])
        # The longest digests first: each is a thread's, and the pages' go by beside.
        marks, jobs = yield from self._marks(client, tenant, resident)
        names = yield from self._rows(client, rows, places)
        for at, job in jobs:
            (digest,) = yield from self._sent(job)
            names.append(digest)
            marks[at] = replace(marks[at], digest=digest)
        client.name(names)
        for mark in marks:
            if (checkpoint := resident.checkpoints.get(mark.tokens)) is not None:
                checkpoint.digest = mark.digest
        names = [*known, *names[: len(rows)]]
        resident.pages = names[:settled]
        header = Header(self._identity, tenant, resident.ids.copy(), tuple(names), tuple(marks))
        data = torch.from_numpy(np.frombuffer(header.encode(), np.uint8).copy())
        yield from self._one(client, tenant, Fixed((data,), kept=True))
        told = [(m.tokens, resident.chain_at(m.tokens), -(-m.tokens // limits.PAGE_TOKENS)) for m in marks]
        number = client.publish(tenant, len(names), told)
        offered = tuple((tokens, chain) for tokens, chain, _ in told)
        self.mirror.apply(self.mirror.sequence, False, (), [Parked(number, tenant, offered)])
        resident.parked, resident.parked_as = tokens, (client.generation, number)
        self._counters.parks += 1
        self._polled_s = -1e9  # the mirror follows at once

    def _still_there(self, client: ParkClient, tenant: bytes, resident: Resident) -> list[bytes]:
        """Pages that were parked before, all or none: they are not even looked at."""
        known = [(name, 0) for name in resident.pages]
        if known and not all(client.lease(tenant, known)):
            client.abandon()
            return []
        return [name for name, _ in known]

    def _marks(
        self, client: ParkClient, tenant: bytes, resident: Resident
    ) -> Generator[int, None, tuple[list[SavedMark], list[tuple[int, Job]]]]:
        """Sends checkpoints; (all of them, what of them is under way by their number, without a digest yet)."""
        state, tokens = resident.state, resident.length
        marks: list[SavedMark] = []
        jobs: list[tuple[int, Job]] = []
        own = min(resident.checkpoints, default=tokens)
        inherited = [one for one in resident.inherited if one[0] < own]  # all are, unless one was thinned out
        inherited = [*inherited[:1], *inherited[1:][-limits.MOST_INHERITED :]]
        every = {*(position for position, _, _ in inherited), *resident.checkpoints, tokens}
        chosen = most_useful(every, self._places(resident))
        for position, waiting, digest in inherited:
            if position in chosen and client.lease(tenant, [(digest, 0)]) == [True]:
                marks.append(SavedMark(position, waiting, digest))
        for position in (one for one in chosen if one >= own):
            checkpoint = resident.checkpoints.get(position)
            if checkpoint is None and position != tokens:  # it gave way between two steps, and was zeroed
                continue
            digest = checkpoint.digest if checkpoint else b""
            if checkpoint and digest and client.lease(tenant, [(digest, 0)]) == [True]:
                marks.append(SavedMark(position, checkpoint.waiting, digest))
                continue
            part = Fixed(checkpoint.tensors) if checkpoint else Fixed(tuple(state.fixed()), state.seated)
            waiting = checkpoint.waiting if checkpoint else state.draft.waiting if state.draft else 0
            jobs.append((len(marks), self._send(client, [part], client.room(tenant, [part.size_bytes]))))
            marks.append(SavedMark(position, waiting, b""))
            yield part.size_bytes
        return marks, jobs

    def _rows(self, client: ParkClient, rows: list[Rows], places: deque[Segments]) -> Generator[int, None, list[bytes]]:
        """Sends pages in batches, some of them under way: one is copied while the others' digests are taken."""
        under: deque[Job] = deque()
        names: list[bytes] = []
        for batch in self._batches(rows):
            under.append(self._send(client, batch, [places.popleft() for _ in batch]))
            yield sum(part.size_bytes for part in batch)
            while len(under) > (BATCHES_IN_A_HURRY if self._hurry else 1):
                names += yield from self._sent(under.popleft())
        while under:
            names += yield from self._sent(under.popleft())
        return names

    def _batches(self, rows: list[Rows]) -> Iterator[list[Rows]]:
        batch: list[Rows] = []
        size_bytes = 0
        for part in rows:
            if batch and size_bytes + part.size_bytes > self._carrier.batch_bytes:
                yield batch
                batch, size_bytes = [], 0
            batch.append(part)
            size_bytes += part.size_bytes
        if batch:
            yield batch

    def _send(self, client: ParkClient, parts: Sequence[Part], places: Sequence[Segments]) -> Job:
        """These parts are on their way to segments of their own."""
        assert client.memory is not None
        self._counters.park_bytes += sum(part.size_bytes for part in parts)
        return self._carrier.out(client.memory, parts, places, hurry=self._hurry)

    def _sent(self, job: Job) -> Generator[int, None, list[bytes]]:
        """Digests, once they are known."""
        while True:
            if self._hurry:
                job.hurry()
            if job.done(STEP_S if self._hurry else 0.0):
                return job.names()
            yield limits.PARK_BYTES_PER_STEP

    def _one(self, client: ParkClient, tenant: bytes, part: Part) -> Generator[int, None, list[bytes]]:
        """Another part, once it is there and named."""
        job = self._send(client, [part], client.room(tenant, [part.size_bytes]))
        yield part.size_bytes
        names = yield from self._sent(job)
        client.name(names)
        return names

    # --- back from the pool

    def poll(self) -> bool:
        """Looks at what the pool has; True when that has changed."""
        now_s = self._clock()
        if not self._usable() or now_s - self._polled_s < limits.PARK_POLL_S:
            return False
        self._polled_s = now_s
        try:
            client, changed = self._connected(), False
            while True:
                sequence, void, more, removed, entries = client.changes(self.mirror.sequence)
                changed |= self.mirror.apply(sequence, void, removed, entries)
                if not more:
                    return changed
        except ParkError as error:
            self._failed(error)
            return True

    def ready(self) -> None:
        """At a lane's start: connects, and gets ready what the first conversations need; not for long."""
        end_s = self._clock() + READY_S
        self.poll()
        while self._clock() < end_s and self.prepare():
            pass

    def prepare(self) -> bool:
        """A small step of getting ready for what the pool has; False when there is none left to do."""
        memory = self._client.memory if self._client is not None else None
        return memory is not None and self._carrier.look(memory)

    def find(self, prompt: Ids, salt: bytes) -> tuple[int, int] | None:
        """(number, tokens) of the longest parked prefix of the prompt; equal chains, tokens not compared yet."""
        self._polled_s = -1e9
        self.poll()
        if not len(self.mirror):
            return None
        values = [EMPTY, *chain(prompt[:-1].tolist(), salt)]
        return self.mirror.longest(snapshot.tenant_key(salt, self._routing), values, prompt.shape[0] - 1)

    def restore(self, found: tuple[int, int], prompt: Ids, resident: Resident) -> bool:
        """Fills a fresh conversation with the first `found[1]` tokens of the prompt; False when they must be read."""
        number, tokens = found
        began_ns = time.monotonic_ns()
        try:
            client = self._connected()
            tenant = snapshot.tenant_key(resident.tenant, self._routing)
            name, size_bytes, segments = client.pin(number, tenant)
            try:
                data = self._get(client, name, size_bytes, segments, limits.MOST_HEADER_BYTES)
                header = Header.decode(data.tobytes(), self._identity, tenant, resident.state.shape.max_tokens)
                self._fill(client, number, header, tokens, prompt, resident)
            finally:
                client.unpin(number)
        except SnapshotRefused as refused:
            self._counters.restores_refused += 1
            self.mirror.forget(number)
            _log.warning("restore_refused", reason=str(refused))
            return False
        except ParkError as error:
            self._counters.restores_refused += 1
            self.mirror.forget(number)
            self._failed(error)
            return False
        self._counters.restores += 1
        self._counters.restore_ns += time.monotonic_ns() - began_ns
        return True

    def _fill(
        self, client: ParkClient, number: int, header: Header, tokens: int, prompt: Ids, resident: Resident
    ) -> None:
        mark = next((mark for mark in header.marks if mark.tokens == tokens), None)
        if mark is None or not np.array_equal(header.ids[:tokens], prompt[:tokens]):
            raise SnapshotRefused("not a prefix of the prompt")
        state, whole = resident.state, header.ids.shape[0]
        if mark.waiting > (state.shape.draft.waiting_rows if state.shape.draft else 0):
            raise SnapshotRefused("more tokens wait than can")
        names = header.pages[: -(-tokens // limits.PAGE_TOKENS)]
        places = client.where(number, [*names, mark.digest])
        pages = Rows.of(state, range(len(names)), whole, tokens)
        if any(size != part.size_bytes for (size, _), part in zip(places, pages, strict=False)):
            raise SnapshotRefused("a page of another size")
        if places[-1][0] != state.shape.fixed_bytes():
            raise SnapshotRefused("a checkpoint of another size")
        assert client.memory is not None
        self._carrier.welcome(state)
        state.reserve(tokens)
        parts: list[Part] = [Fixed(tuple(state.fixed()), state.seated), *pages]  # the longest digest first
        segments = [each for _, each in (places[-1], *places[:-1])]
        self._carrier.back(client.memory, parts, segments, [mark.digest, *names])
        if state.draft is not None:
            state.draft.waiting = mark.waiting
        state.length = tokens
        resident.write(0, prompt[:tokens])
        resident.pages = list(header.pages[: (tokens - mark.waiting) // limits.PAGE_TOKENS])
        resident.inherited = [(m.tokens, m.waiting, m.digest) for m in header.marks if m.tokens <= tokens]
        resident.parked, resident.parked_as = tokens, (client.generation, number)

    def _get(
        self, client: ParkClient, name: bytes, size_bytes: int, segments: tuple[int, ...], most_bytes: int | None = None
    ) -> snapshot.Bytes:
        """A copy of a part, verified after it was copied."""
        assert client.memory is not None
        if size_bytes > (client.memory.total_bytes if most_bytes is None else most_bytes):
            raise SnapshotRefused("a part that is too large")
        data = np.empty(size_bytes, np.uint8)
        client.memory.read(segments, data)
        if snapshot.digest(data) != name:
            raise SnapshotRefused("a damaged part")
        return data

    # --- the owner

    def _usable(self) -> bool:
        return self._clock() >= self._retry_s

    def _connected(self) -> ParkClient:
        if self._client is None:
            self._client = ParkClient(self._path)
            self.mirror = ParkMirror()
        return self._client

    def _failed(self, error: ParkError) -> None:
        """Everything held is given up with the connection, and the owner is left alone for a while."""
        _log.info("park_failed", code=error.code, reason=str(error))
        self._job = None
        self._retry_s = self._clock() + limits.PARK_RETRY_S
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._carrier.forget()
            self._client.close()
            self._client = None
            self.mirror = ParkMirror()
