"""Whether two greedy answers part where the model itself hardly chooses: margin-equal, judged in this process.

The rule: up to the parting both are the same ids; there the logits of the two ids, computed here from the common ids,
are no further apart than twice the tolerance of the pack's dense dtype, of the row's greatest logit (each answer's own
logits may have moved by one tolerance). What comes after a parting is another text and is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.quality import FileRecords, logits
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.selftest import BF16_TOLERANCE, FP32_TOLERANCE
from shared_experts.pack import Pack


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two answers differ; None where they are the same. One that is shorter parts at its end."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@dataclass(frozen=True, slots=True)
class Choice:
    """How near the model is to a tie between two ids, of the row's greatest logit, and what is allowed."""

    apart: float
    allowed: float

    @property
    def near(self) -> bool:
        """Whether either is right."""
        return self.apart <= self.allowed


def tolerance(pack: Pack) -> float:
    """How far logits of two runs may be apart, of the row's greatest logit."""
    return FP32_TOLERANCE if pack.manifest.dense_dtype == "f32" else BF16_TOLERANCE


def choice(pack_path: Path, ids: Sequence[int], one: int, other: int) -> Choice:
    """Between two ids after `ids`: the further of them from the row's greatest logit counts."""
    with Pack.open(pack_path) as pack:
        info, counters = pack.manifest.experts, Counters()
        kernel = ExpertKernel(info.layout, threads=torch.get_num_threads())
        try:
            cache = ExpertCache(FileRecords(pack), info, 0, adaptive, counters)
            row = logits(pack, ExpertStore(kernel, cache, counters), list(ids))[-1].double()
        finally:
            kernel.close()
        allowed = 2 * tolerance(pack)
    behind = float(row.max() - torch.minimum(row[one], row[other]))
    return Choice(behind / float(row.abs().max()), allowed)
