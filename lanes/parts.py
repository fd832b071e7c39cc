"""What a lane's computing parts are made of, and what they are, on whichever device.

Between `startup`, which opens and puts together, and what makes the parts of one device (`startup.cpu_parts`,
`startup_cuda`). Invariant: whatever is opened here is closed by the lane's own stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lanes import limits
from lanes.chunk import Chunk
from lanes.config import LaneConfig
from lanes.counters import Counters
from lanes.errors import StartError
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.pinned import with_pins
from lanes.experts.policy import Policy
from lanes.models import Model
from lanes.models.qwen4_exp.spec import Spec
from lanes.runner import Experts, Runner
from lanes.state.carrier import Carrier
from lanes.state.pool import StatePool
from shared_experts.attach import AttachedRegion
from shared_experts.pack import Pack


@dataclass(frozen=True, slots=True)
class Parts:
    """What computes, on whichever device."""

    kernel: ExpertKernel
    experts: Experts
    model: Model
    states: StatePool
    context_tokens: int
    cache: ExpertCache
    chunk: Chunk
    # Measures how prompts are read best; parts of at most so many rows are then read by decode windows.
    windows_up_to: Callable[[Runner], int] = lambda runner: 0
    carrier: Carrier = field(default_factory=Carrier)  # of conversations to the host's park pool


@dataclass(frozen=True, slots=True)
class Opened:
    """What parts are made of; whatever they open is closed by `stack`."""

    config: LaneConfig
    pack: Pack
    region: AttachedRegion
    policy: Policy
    counters: Counters
    stack: contextlib.ExitStack

    @property
    def draft_layer(self) -> bool:
        """Whether the pack has a draft layer and may use it."""
        return self.pack.manifest.experts.draft_layers > 0 and self.config.drafts != 0

    @property
    def cache_policy(self) -> Policy:
        """The policy, with the draft layer's experts pinned where they fit."""
        info = self.pack.manifest.experts
        first = (info.layers - info.draft_layers) * info.experts  # the first draft layer is the one that is used
        return with_pins(self.policy, np.arange(first, first + info.experts)) if self.draft_layer else self.policy

    def kernel(self, cores: tuple[int, ...]) -> ExpertKernel:
        """The native kernel on some of this lane's cores, the calling thread's first."""
        kernel = ExpertKernel(
            self.pack.manifest.experts.layout,
            cores=cores if self.config.pinned else None,
            threads=len(cores),
            isa=self.config.expert_isa,
        )
        self.stack.callback(kernel.close)
        return kernel

    def context_tokens(self, spec: Spec) -> int:
        """Of one sequence at most; StartError where more were asked for than the model has."""
        asked = self.config.context_tokens
        if asked is not None and asked > spec.max_tokens:
            raise StartError(f"--context: {asked} tokens; the model holds at most {spec.max_tokens}")
        return min(asked or limits.DEFAULT_CONTEXT_TOKENS, spec.max_tokens)
