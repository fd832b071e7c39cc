"""Pinned host memory of a GPU lane's states, and copies on a stream of their own.

    out    device ──▶ host, beside what computes; what overwrites the source waits for it on the device
    back   host ──▶ device, in the computing stream
    keep   device ──▶ staging on the device, at once ──▶ host, beside what computes

Not here: which state goes where (lanes.state). On a device "cpu" everything happens at once, in the same order. The
memory of an `Arena` goes back to it only after copies from it have ended.

Invariant: nothing waits on the CPU but `Arrival.wait`, and a staging area that is still being emptied, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lanes.device.arena import Arena
from lanes.device.side import Side
from lanes.device.staging import Staging
from lanes.state.host import HERE, PLACE_BYTES, Arrival, Host, Pairs, Spec, cut, room_bytes


class PinnedHost(Host):
    """`staging` has room for what `keep` is given."""

    def __init__(self, arena: Arena, side: Side, staging: Staging) -> None:
        self._arena, self._side, self._staging = arena, side, staging
        self._read: Arrival = HERE  # the last copies to the device

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the arena, while it has room."""
        return self._arena.allocate(size, dtype)

    def allocate_all(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """In one piece where there is one: it is given back at once then, and copied in few."""
        whole = self._arena.place(room_bytes(specs))
        return super().allocate_all(specs) if whole is None else cut(whole, specs)

    def wipe(self, tensor: torch.Tensor) -> None:
        """The arena zeroes what it gets back; other memory is zeroed here, once it was read."""
        if tensor not in self._arena:
            if tensor.device.type == "cpu":
                self._read.wait()
            tensor.zero_()

    def out(self, pairs: Pairs) -> Arrival:
        """On the copies' stream."""
        self._side.after_compute()
        with self._side.here():
            _copy(pairs)
        arrival = self._side.copied()
        self._until(arrival, [to for to, _ in pairs])
        return arrival

    def back(self, pairs: Pairs) -> None:
        """On the computing stream; the sources are held until they were read."""
        _copy(pairs)
        self._read = self._side.computed()
        self._until(self._read, [source for _, source in pairs])

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Arrival]:
        """By way of the staging area."""
        here = self._staging.device
        there = [tensor for tensor in tensors if tensor.device == here]
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in there]
        size_bytes = room_bytes(specs)
        piece = self._staging.piece(size_bytes)
        _copy(list(zip(cut(piece.memory, specs), there, strict=True)))
        whole = self.allocate((size_bytes,), torch.uint8)
        arrival = self.out([(whole, piece.memory)])
        piece.free_after(arrival)
        kept = iter(cut(whole, specs))
        return tuple(next(kept) if tensor.device == here else self._clone(tensor) for tensor in tensors), arrival

    def share(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same memory, where the arena keeps it for as long as somebody refers to it."""
        return tuple(tensor if tensor in self._arena else self._clone(tensor) for tensor in tensors)

    def erase(self) -> None:
        """Of the staging area."""
        self._staging.erase()

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _until(self, arrival: Arrival, tensors: list[torch.Tensor]) -> None:
        """The tensors' memory is not given back before."""
        held = [tensors]

        def let_go() -> None:
            arrival.wait()
            held.clear()

        self._arena.later(let_go)


def _copy(pairs: Pairs) -> None:
    """All of them: neighbours on both sides as one, and rows of several heads, which lie apart, head by head."""
    to: list[torch.Tensor] = []
    source: list[torch.Tensor] = []
    for there, here in _merged(pairs):
        if there.is_contiguous() and here.is_contiguous():
            to.append(there)
            source.append(here)
        else:
            to += there.unbind()
            source += here.unbind()
    if to:
        torch._foreach_copy_(to, source, non_blocking=True)


def _merged(pairs: Pairs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same; contiguous tensors that follow one another equally far apart on both sides, less than a place between
    them, are one span of bytes."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    span: list[tuple[torch.Tensor, torch.Tensor]] = []

    def close() -> None:
        found.extend(span if len(span) < 2 else [(_span([a for a, _ in span]), _span([b for _, b in span]))])
        span.clear()

    for pair in pairs:
        if not pair[0].numel():
            continue
        if span and not _follows(span[-1], pair):
            close()
        span.append(pair)
    close()
    return found


def _follows(last: tuple[torch.Tensor, torch.Tensor], pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether a pair is the next one on both sides, equally far away."""
    neighbours = all(_next(old, new) for old, new in zip(last, pair, strict=True))
    return neighbours and _gap(last[0], pair[0]) == _gap(last[1], pair[1])


def _gap(old: torch.Tensor, new: torch.Tensor) -> int:
    return new.data_ptr() - old.data_ptr() - old.nbytes


def _next(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether one memory has both, one behind the other."""
    together = old.is_contiguous() and new.is_contiguous()
    if not together or old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
        return False
    return 0 <= _gap(old, new) < PLACE_BYTES


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """From the first byte of the first to the last of the last, uint8."""
    first = tensors[0].flatten().view(torch.uint8)
    size_bytes = tensors[-1].data_ptr() + tensors[-1].nbytes - tensors[0].data_ptr()
    return first.as_strided((size_bytes,), (1,), first.storage_offset())
