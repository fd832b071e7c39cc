"""The processes that train together, one on each GPU: gradients averaged, decisions made by the first.

Started by torchrun, or alone. Not here: what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Group:
    """This process among `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Group:
        """The group that torchrun's environment names; a process of its own otherwise."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    def leave(self) -> None:
        """Ends the group."""
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this process decides, logs and saves."""
        return self.rank == 0

    def share(self, count: int) -> int:
        """This process's part of `count` sequences. ValueError where it does not divide."""
        if count % self.size:
            raise ValueError(f"{count} sequences over {self.size} processes")
        return count // self.size

    def first(self, *values: float) -> list[float]:
        """What the first process says; no device waits."""
        if self.size == 1:
            return list(values)
        said = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(said, 0)
        return [float(value) for value in said]

    def average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Every gradient becomes its mean over the processes."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        parts = (flat / self.size).split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


ALONE = Group()
