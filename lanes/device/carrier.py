"""Conversations between a GPU's memory and the park pool, by copy engines; digests by threads beside.

    out    rows ─gather─▶ staging ─copies─▶ segments ─▶ digest            gather: the computing stream, at memory speed
    back   segments ─copies─▶ staging ─scatter─▶ rows,  segments ─▶ digest, checked

Pages lie apart in a state (some rows of every buffer of every layer) and together in the pool, so they are put together
on the device, many at once: then copies are few and large. A part's digest is taken of its segments after the copy: on
the way back a stray write before the copy is seen. What lies in host memory is copied by threads.

Not here: which parts (parking). Invariant: what is told to the computing stream after `out` may overwrite the parts.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import structlog
import torch

from lanes.affinity import keep_to, step_back
from lanes.device import pages
from lanes.device.pool_pins import PoolPins
from lanes.device.side import Side
from lanes.device.staging import Staging
from lanes.state.carrier import Carrier, Job, Part, Segments
from lanes.state.errors import SnapshotRefused
from lanes.state.host import Arrival
from lanes.state.sequence import SequenceState
from shared_experts import park_digest, park_hand
from shared_experts.errors import ParkError, ParkRefused
from shared_experts.park_memory import ParkMemory

MOST_THREADS = 12  # that take digests: one reads 4 to 5 GB/s of what a device has just written, a link brings 55
LOOK_S = 0.002  # that a step of getting ready waits

_log = structlog.get_logger(__name__)


class _Digest(Future[bytes]):
    """Of a piece of a part, by the first of the threads that come to it."""

    def __init__(self, take: Callable[..., bytes], *given: Any) -> None:
        super().__init__()
        self._work, self._taken = functools.partial(take, *given), threading.Lock()

    def take(self) -> None:
        """By this thread, if by none yet."""
        if self._taken.acquire(blocking=False) and self.set_running_or_notify_cancel():
            try:
                self.set_result(self._work())
            except BaseException as error:
                self.set_exception(error)

    @property
    def waits(self) -> bool:
        """Whether no thread has come to it."""
        return not (self._taken.locked() or self.done())


class _Under(Job):
    """Digests that threads take, of each part's pieces."""

    def __init__(self, parts: list[list[_Digest]], quick: Executor) -> None:
        self._parts, self._quick, self._hurried = parts, quick, False
        self._digests = [digest for part in parts for digest in part]

    def hurry(self) -> None:
        """What no thread has come to is for those that nobody computes beside, too."""
        if not self._hurried:
            self._hurried = True
            for digest in self._digests:
                if digest.waits:
                    self._quick.submit(digest.take)

    def done(self, within_s: float = 0.0) -> bool:
        """Whether all are known."""
        if within_s:
            wait(self._digests, within_s)
        return all(digest.done() for digest in self._digests)

    def names(self) -> list[bytes]:
        """Once they are."""
        return _names(self._parts)


class DeviceCarrier(Carrier):
    """`seat` moves a state to the device; `cores` are where its threads may run while nothing computes."""

    def __init__(
        self,
        side: Side,
        staging: Staging,
        pins: PoolPins,
        *,
        seat: Callable[[SequenceState], None],
        stays: Callable[[torch.Tensor], bool],
        cores: Sequence[int] = (),
    ) -> None:
        """`stays(tensor)`: its memory is not written while somebody refers to it (an `Arena`'s)."""
        self._side, self._staging, self._pins, self._seat, self._stays = side, staging, pins, seat, stays
        self._quick = ThreadPoolExecutor(threads_on(cores), "park", keep_to, (set(cores),))
        self._slow = ThreadPoolExecutor(1, "park-beside", step_back)
        self._under: list[_Digest] = []
        self._known = pages.Known()
        self._taken: tuple[tuple[int, int], Future[None]] | None = None  # memory of a piece of the pool, by a thread
        self._began_s: float | None = None  # to register pieces
        self._stopping = park_hand.Stop()
        self.batch_bytes = staging.half_bytes

    def out(self, memory: ParkMemory, parts: Sequence[Part], places: Sequence[Segments], *, hurry: bool) -> Job:
        """Seated parts by copies, others by threads."""
        found: list[list[_Digest]] = []
        threads = self._quick if hurry else self._slow
        try:
            for group in pages.groups(list(zip(parts, places, strict=True)), self.batch_bytes):
                if group[0][0].seated:
                    found += self._send(memory, group, threads)
                    continue
                for part, segments in group:
                    # What may be given back before a thread has come to it is copied now.
                    tensors = [each if part.kept or self._stays(each) else each.clone() for each in part.tensors()]
                    pieces = park_digest.cut(memory.runs(segments, part.size_bytes))
                    given = ((memory, tensors, at * park_digest.PIECE_BYTES, runs) for at, runs in enumerate(pieces))
                    found.append(_taken_by(threads, [_Digest(_by_hand, *each, self._stopping) for each in given]))
        finally:  # `settle` knows of what has begun, also before something that failed
            self._remember(found)
        return _Under(found, self._quick)

    def back(
        self, memory: ParkMemory, parts: Sequence[Part], places: Sequence[Segments], names: Sequence[bytes]
    ) -> None:
        """Copies, and digests beside them."""
        found: list[list[_Digest]] = []
        for group in pages.groups(list(zip(parts, places, strict=True)), self.batch_bytes):
            piece = self._staging.piece(sum(part.size_bytes for part, _ in group))
            runs = self._runs(memory, group)
            at = piece.memory.data_ptr()
            for offset, size_bytes in itertools.chain(*runs):
                self._side.copy(at, memory.address + offset, size_bytes, pinned=not self._pins.refused)
                at += size_bytes
            landed = self._side.copied()
            landed.before_compute()
            pages.scatter(piece.memory, [part for part, _ in group], memory, runs, self._known)
            piece.free_after(self._side.computed())
            # After all that reads the segments, this thread too: what is written there before is in the digest.
            found += self._digested(memory, runs, landed, self._quick)
            self._remember(found[-len(group) :])  # `settle` waits for them, whatever fails here
        if _names(found) != list(names):
            raise SnapshotRefused("a damaged part")

    def settle(self) -> None:
        """Gives up what has not begun, and waits for the rest."""
        self._stopping.set()
        for digest in self._under:
            digest.cancel()
        wait(self._under)
        self._side.copied().wait()
        if self._taken is not None:
            wait([self._taken[1]])
            self._taken = None
        self._under.clear()
        self._stopping = park_hand.Stop()

    def welcome(self, state: SequenceState) -> None:
        """It takes the seat: its parts come back to the device."""
        self._seat(state)

    def look(self, memory: ParkMemory) -> bool:
        """Registers another piece of what the owner has used or soon may, whose memory a thread has taken before: that
        is most of the work."""
        self._follow(memory)
        found = self._pins.next(memory)
        if found is None:
            if self._began_s is not None:
                seconds, self._began_s = round(time.monotonic() - self._began_s, 3), None
                _log.info("park_pool_pinned", bytes=self._pins.registered_bytes, seconds=seconds)
            return False
        self._began_s = self._began_s or time.monotonic()
        if self._taken is not None and self._taken[0] != found and wait([self._taken[1]], LOOK_S).not_done:
            return True  # one at a time: `settle` waits for all that writes to this map
        if self._taken is None or self._taken[0] != found:
            self._taken = (found, self._quick.submit(memory.populate, *found))
        if wait([self._taken[1]], LOOK_S).done:
            self._pins.cover(memory, *found)
        return True

    def forget(self) -> None:
        """Nothing of the pool is registered any more."""
        self.settle()
        self._pins.drop()

    def close(self) -> None:
        """Ends the threads."""
        self.forget()
        self._quick.shutdown()
        self._slow.shutdown()

    def _send(
        self, memory: ParkMemory, group: list[tuple[Part, Segments]], threads: ThreadPoolExecutor
    ) -> list[list[_Digest]]:
        piece = self._staging.piece(sum(part.size_bytes for part, _ in group))
        pages.gather(piece.memory, [part for part, _ in group], self._known)
        self._side.after_compute()
        runs = self._runs(memory, group)
        at = piece.memory.data_ptr()
        for offset, size_bytes in itertools.chain(*runs):
            self._side.copy(memory.address + offset, at, size_bytes, pinned=not self._pins.refused)
            at += size_bytes
        sent = self._side.copied()
        piece.free_after(sent)
        return self._digested(memory, runs, sent, threads)

    def _remember(self, parts: list[list[_Digest]]) -> None:
        """Addresses are read from here on: `settle` waits."""
        self._under = [one for one in self._under if not one.done()] + [one for part in parts for one in part]

    def _digested(
        self, memory: ParkMemory, parts: list[pages.Runs], arrival: Arrival, threads: Executor
    ) -> list[list[_Digest]]:
        """Of parts in the pool, by these threads."""
        pieces = [park_digest.cut(runs) for runs in parts]
        return [_taken_by(threads, [_Digest(_digest, memory, runs, arrival) for runs in part]) for part in pieces]

    def _runs(self, memory: ParkMemory, group: list[tuple[Part, Segments]]) -> list[pages.Runs]:
        """Where each part is in the pool; all of it is registered from here on."""
        self._follow(memory)
        found = [memory.runs(segments, part.size_bytes, self._pins.piece_bytes) for part, segments in group]
        for offset, size_bytes in itertools.chain(*found):
            self._pins.cover(memory, offset, size_bytes)
        return found

    def _follow(self, memory: ParkMemory) -> None:
        """Memory that the owner gave back is not what was registered."""
        self._side.bind()
        if self._pins.stale(memory):
            self._side.copied().wait()
            self._pins.drop()


def threads_on(cores: Sequence[int]) -> int:
    """How many take digests: as many as run at once, of cores of the lane's own or of all that it may use."""
    return max(2, min(MOST_THREADS, len(cores) or len(os.sched_getaffinity(0))))


def _taken_by(threads: Executor, digests: list[_Digest]) -> list[_Digest]:
    for digest in digests:
        threads.submit(digest.take)
    return digests


def _names(parts: list[list[_Digest]]) -> list[bytes]:
    """Whatever a thread failed at costs the parking, or a reading, and not the lane: nothing of its state was in it."""
    try:
        return [park_digest.of_pieces([digest.result() for digest in pieces]) for pieces in parts]
    except ParkError:
        raise
    except Exception as error:
        _log.exception("park_thread_failed")
        raise ParkRefused(f"a digest failed: {error!r}") from error


def _digest(memory: ParkMemory, runs: pages.Runs, arrival: Arrival) -> bytes:
    """Of a piece in the pool, once copies that concern it have ended."""
    arrival.wait()
    found = park_hand.load()([(memory.address + offset, size_bytes, 0) for offset, size_bytes in runs], None)
    assert found is not None, "nobody stops it"
    return found


def _by_hand(
    memory: ParkMemory, tensors: Sequence[torch.Tensor], at: int, runs: pages.Runs, stop: park_hand.Stop
) -> bytes:
    """A piece of tensors in host memory, from their byte `at` on, by this thread alone. The digest is of the source:
    what happens to the pool is seen."""
    places, alive = _places(memory, tensors, at, runs)
    found = park_hand.load()(places, stop)
    alive.clear()
    if found is None:
        raise ParkRefused("given up")
    return found


def _places(
    memory: ParkMemory, tensors: Sequence[torch.Tensor], at: int, runs: pages.Runs
) -> tuple[list[park_hand.Place], list[torch.Tensor]]:
    """Where these bytes are and go, and what must live until then."""
    places: list[park_hand.Place] = []
    alive: list[torch.Tensor] = []
    left = deque(runs)
    for tensor in tensors:
        if not left:
            break
        if tensor.nbytes <= at:
            at -= tensor.nbytes
            continue
        for data in _flat(tensor):
            size_bytes, skipped = data.nbytes, min(at, data.nbytes)
            at -= skipped
            alive.append(data)
            while left and skipped < size_bytes:
                offset, room = left.popleft()
                step = min(room, size_bytes - skipped)
                places.append((data.data_ptr() + skipped, step, memory.address + offset))
                skipped += step
                if step < room:
                    left.appendleft((offset + step, room - step))
    return places, alive


def _flat(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes in order, in pieces that lie together: rows of several heads lie apart."""
    pieces = [tensor] if tensor.is_contiguous() else list(tensor)
    return [piece.contiguous() for piece in pieces if piece.numel()]
