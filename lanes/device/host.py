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
from lanes.device.staging import Staging, kept_bytes
from lanes.state.host import Arrival, Host, Pairs


class PinnedHost(Host):
    """`staging` has room for what `keep` is given."""

    def __init__(self, arena: Arena, side: Side, staging: Staging) -> None:
        self._arena, self._side, self._staging = arena, side, staging

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the arena, while it has room."""
        return self._arena.allocate(size, dtype)

    def wipe(self, tensor: torch.Tensor) -> None:
        """The arena zeroes what it gets back; other memory is zeroed here."""
        if tensor not in self._arena:
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
        self._until(self._side.computed(), [source for _, source in pairs])

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Arrival]:
        """By way of the staging area."""
        there = [tensor for tensor in tensors if tensor.device == self._staging.device]
        size_bytes = kept_bytes(there)
        piece = self._staging.piece(size_bytes)
        torch._foreach_copy_(_cut(piece.memory, there), there)
        whole = self.allocate((size_bytes,), torch.uint8)
        arrival = self.out([(whole, piece.memory)])
        piece.free_after(arrival)
        kept = iter(_cut(whole, there))
        here = self._staging.device
        return tuple(next(kept) if tensor.device == here else self._clone(tensor) for tensor in tensors), arrival

    def share(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same memory, where the arena keeps it for as long as somebody refers to it."""
        return tuple(tensor if tensor in self._arena else self._clone(tensor) for tensor in tensors)

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _until(self, arrival: Arrival, tensors: list[torch.Tensor]) -> None:
        """The tensors' memory is not given back before."""
        held = [tensors]

        def let_go() -> None:
            arrival.wait()
            held.clear()

        self._arena.later(let_go)


def _cut(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these, one behind the other in memory uint8."""
    found, at = [], 0
    for tensor in like:
        found.append(memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += kept_bytes([tensor])
    return found


def _copy(pairs: Pairs) -> None:
    """All of them; rows of several heads, which lie apart, head by head: what a copy engine takes in one piece."""
    to: list[torch.Tensor] = []
    source: list[torch.Tensor] = []
    for there, here in pairs:
        if there.numel() and there.is_contiguous() and here.is_contiguous():
            to.append(there)
            source.append(here)
        elif there.numel():
            to += there.unbind()
            source += here.unbind()
    if to:
        torch._foreach_copy_(to, source, non_blocking=True)
