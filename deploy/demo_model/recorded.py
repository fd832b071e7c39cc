"""A step's losses and gradients recorded as a CUDA graph, so that a step costs the device's work and not its launches.

Nine thousand launches of a step take a CPU longer than their work takes a GPU. Invariant: after a call every
parameter's `grad` holds the gradient of that call's batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Compute = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]  # batch, taught; leaves gradients
WARM_UP = 3  # passes before recording: libraries choose and allocate
MOST_APART = 0.1  # relative, of all gradients together


class Recorded:
    """`compute` for batches of one shape."""

    def __init__(
        self, compute: Compute, batch: torch.Tensor, taught: torch.Tensor, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Records, and compares with a pass that is not; RuntimeError where they differ or CUDA refuses."""
        self._batch, self._taught, self._parameters = batch.clone(), taught.clone(), parameters
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._forget()
                compute(self._batch, self._taught)
            truth = [None if p.grad is None else p.grad.clone() for p in parameters]
        current.wait_stream(side)
        self._forget()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events
            self._parts = compute(self._batch, self._taught)
        self._gradients = [p.grad for p in parameters]
        self(batch, taught)
        pairs = [(g, t) for g, t in zip(self._gradients, truth, strict=True) if g is not None and t is not None]
        wrong, length = (
            torch.stack([x.norm() for x in xs]).norm() for xs in ([g - t for g, t in pairs], [t for _, t in pairs])
        )
        self.apart = float(wrong / length)
        if not self.apart < MOST_APART:
            raise RuntimeError(f"recorded gradients are {self.apart:.3f} apart from those that are not")

    def __call__(self, batch: torch.Tensor, taught: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses of a batch; the tensors are the same at every call."""
        self._batch.copy_(batch)
        self._taught.copy_(taught)
        self._graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._parts

    def _forget(self) -> None:
        for p in self._parameters:
            p.grad = None
