"""Host memory whose copies out are done only when they are waited for: who reads earlier reads rubbish."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lanes.state.host import Arrival, Host, Pairs


class Late(Arrival):
    """Copies that were asked for."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = list(pairs)
        for to, _ in self._pairs:
            to.view(torch.uint8).fill_(0x5A)

    def wait(self) -> None:
        for to, source in self._pairs:
            to.copy_(source)
        self._pairs.clear()

    def before_compute(self) -> None:
        self.wait()


class LateHost(Host):
    """`keep` takes a copy at once, as a staging area on the device does, and brings it later."""

    def out(self, pairs: Pairs) -> Arrival:
        return Late(pairs)

    def keep(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Arrival]:
        pairs = [(torch.empty_like(tensor), tensor.clone()) for tensor in tensors]
        return tuple(to for to, _ in pairs), Late(pairs)
