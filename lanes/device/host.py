"""Pinned host memory of a GPU lane's states, and copies on a stream of their own.

    out    device ──▶ host, beside what computes; what overwrites the source waits for it on the device
    back   host ──▶ device, in the computing stream
    keep   device ──▶ staging on the device, at once ──▶ host, beside what computes

Not here: which state goes where (lanes.state). On a device "cpu" everything happens at once, in the same order. The
memory of an `Arena` goes back to it only after copies from it have ended.

Invariant: nothing waits on the CPU but `Arrival.wait`, and a staging area that is still being emptied, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lanes.device.arena import Arena
from lanes.state.host import HERE, Arrival, Host, Pairs

_ALIGNMENT_BYTES = 16


class _Event(Arrival):
    """Of copies on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        """Sleeps until then."""
        self._event.synchronize()

    def before_compute(self) -> None:
        """By the device alone."""
        torch.cuda.current_stream().wait_event(self._event)


class PinnedHost(Host):
    """Takes `most_kept_bytes` of the device's memory for `keep`."""

    def __init__(self, arena: Arena, device: torch.device | str, most_kept_bytes: int) -> None:
        device = torch.device(device)
        self._arena = arena
        self._staging = torch.empty(most_kept_bytes, dtype=torch.uint8, device=device)
        self._staged = HERE
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the arena, while it has room."""
        return self._arena.allocate(size, dtype)

    def wipe(self, tensor: torch.Tensor) -> None:
        """The arena zeroes what it gets back; other memory is zeroed here."""
        if tensor not in self._arena:  # which zeroes what it gets back
            tensor.zero_()

    def out(self, pairs: Pairs) -> Arrival:
        """On the copies' stream."""
        if self._stream is None:
            return super().out(pairs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, source in _contiguous(pairs):
                to.copy_(source, non_blocking=True)
        arrival = _Event(self._stream)
        self._until(arrival, [to for to, _ in pairs])
        return arrival

    def back(self, pairs: Pairs) -> None:
        """On the computing stream; the sources are held until they were read."""
        if self._stream is None:
            return super().back(pairs)
        for to, source in _contiguous(pairs):
            to.copy_(source, non_blocking=True)
        self._until(_Event(torch.cuda.current_stream()), [source for _, source in pairs])

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Arrival]:
        """By way of the staging area."""
        there = [tensor for tensor in tensors if tensor.device == self._staging.device]
        size_bytes = staging_bytes(there)
        assert size_bytes <= self._staging.shape[0]
        self._staged.before_compute()
        for place, tensor in zip(_cut(self._staging, there), there, strict=True):
            place.copy_(tensor)
        whole = self.allocate((size_bytes,), torch.uint8)
        self._staged = arrival = self.out([(whole, self._staging[:size_bytes])])
        kept = iter(_cut(whole, there))
        here = self._staging.device
        return tuple(next(kept) if tensor.device == here else self._clone(tensor) for tensor in tensors), arrival

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _until(self, arrival: Arrival, tensors: list[torch.Tensor]) -> None:
        """The tensors' memory is not given back before."""
        held = [tensors]

        def let_go() -> None:
            arrival.wait()
            held.clear()

        self._arena.later(let_go)


def staging_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What `keep` needs of the device's memory for them."""
    return sum(-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors)


def _cut(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these, one behind the other in memory uint8."""
    found, at = [], 0
    for tensor in like:
        found.append(memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += staging_bytes([tensor])
    return found


def _contiguous(pairs: Pairs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same, where rows of several heads lie apart head by head: what a copy engine takes in one piece."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for to, source in pairs:
        if to.numel() and to.is_contiguous() and source.is_contiguous():
            found.append((to, source))
        elif to.numel():
            found += zip(to, source, strict=True)
    return found
