"""Whether two greedy answers part where the model itself hardly chooses: margin-equal, judged in this process.

The rule: up to the parting both are the same ids; there the logits of the two ids, computed here from the common ids,
are no further apart than twice what is common for the pack (lanes.tolerance; each answer's own logits may have moved by
that). What comes after a parting is another text and is not compared.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.quality import FileRecords, logits
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.tolerance import Tolerance, compare
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


def tolerance(pack: Pack) -> Tolerance:
    """How far logits of two runs may be apart."""
    return Tolerance.of(pack.manifest.dense_dtype, pack.manifest.experts.format)


class Apart(AssertionError):
    """Farther than the tolerance; the text has the figures."""


def apart(got: torch.Tensor, want: torch.Tensor, allowed: Tolerance, rounded: torch.Tensor | None = None) -> str:
    """How far teacher-forced logits [T, V] are apart, in words; raises Apart where they are not margin-equal.

    `rounded`: what the truth says where it rounds as the other side does. By as much a row may be further apart."""
    moved = None if rounded is None else compare(rounded.numpy(), want.numpy(), allowed).offs
    found = compare(got.numpy(), want.numpy(), allowed, 0.0 if moved is None else moved)
    median, tenth, most = _quantiles(found.offs)
    text = (
        f"median {median:.1e}, 90th {tenth:.1e} ({allowed.common:.0e}), most {most:.1e} of scale ({allowed.most:.0e}), "
        f"{found.other} other ids of {found.sure} sure ones in {len(found.offs)}"
    )
    if moved is not None:
        text += "; rounding alone: {:.1e}, {:.1e}, {:.1e}".format(*_quantiles(moved))
    if not found.held(allowed):
        raise Apart(text)
    return text


def _quantiles(offs: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """Median, 90th, most."""
    median, tenth, most = (float(value) for value in np.quantile(offs, (0.5, 0.9, 1.0), method="higher"))
    return median, tenth, most


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
        allowed = 2 * tolerance(pack).common
    behind = float(row.max() - torch.minimum(row[one], row[other]))
    return Choice(behind / float(row.abs().max()), allowed)
