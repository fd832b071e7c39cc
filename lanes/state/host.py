"""Host memory of states that wait, and the way between it and the memory of a device.

Here as every lane may have it: plain memory, and a copy is done once it was asked for. `lanes.device.host` has memory
that a GPU copies from and to by itself, beside what computes. Not here: which state goes where (seat, checkpoint).

Invariants: whoever reads on the CPU what came `out` has waited for it; what computes after `back` or
`before_compute` finds what was copied; memory that is given back was zeroed, or is before anybody gets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from shared_experts.layout import align

PLACE_BYTES = 512  # where a tensor may begin in memory of many
Spec = tuple[tuple[int, ...], torch.dtype]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (to, from), of equal shapes


def room_bytes(specs: Iterable[Spec]) -> int:
    """Of memory for such tensors, one behind the other."""
    return sum(_place_bytes(spec) for spec in specs)


def cut(memory: torch.Tensor, specs: Iterable[Spec]) -> list[torch.Tensor]:
    """These tensors in memory uint8, one behind the other."""
    found, at = [], 0
    for size, dtype in specs:
        found.append(memory[at : at + math.prod(size) * dtype.itemsize].view(dtype).view(size))
        at += _place_bytes((size, dtype))
    return found


def _place_bytes(spec: Spec) -> int:
    size, dtype = spec
    return align(math.prod(size) * dtype.itemsize, PLACE_BYTES)


class Arrival:
    """When a copy is there: here at once."""

    def wait(self) -> None:
        """Until the CPU may read it."""

    def before_compute(self) -> None:
        """What computes from here on comes after it."""


HERE = Arrival()


class Host:
    """Plain memory."""

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory with any contents."""
        return torch.empty(size, dtype=dtype)

    def allocate_all(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """The same for tensors that come and go together."""
        return [self.allocate(*spec) for spec in specs]

    def wipe(self, tensor: torch.Tensor) -> None:
        """Nobody reads it any more, and nobody ever will."""
        tensor.zero_()

    def out(self, pairs: Pairs) -> Arrival:
        """Copies from a device after all that was computed there, in the order in which they are asked for; what is
        computed next may overwrite the sources only after `before_compute`."""
        for to, source in pairs:
            to.copy_(source)
        return HERE

    def back(self, pairs: Pairs) -> None:
        """Copies to a device before what is computed next. The sources may be given back at once."""
        for to, source in pairs:
            to.copy_(source)

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Arrival]:
        """Copies in host memory; the tensors may be overwritten at once."""
        return tuple(tensor.to("cpu", copy=True) for tensor in tensors), HERE

    def share(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What `keep` gives of tensors in host memory: whoever has them writes only into others from now on."""
        return tuple(tensor.clone() for tensor in tensors)

    def erase(self) -> None:
        """Zeroes what copies have left on their way: another tenant's come next."""


PLAIN = Host()
