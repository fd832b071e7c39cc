"""What a proposer hands over: ids that may follow the next token, each with how sure it is of it.

Not here: making them (chain, lookup), how many are worth a row (policy). A proposal changes no answer: what is sent is
drawn from the model's own logits, and a draft only decides whether the row after it was computed already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["layer", "lookup"]
SOURCES: tuple[Source, ...] = ("layer", "lookup")


@dataclass(frozen=True, slots=True)
class Proposal:
    """At most MAX_DRAFTS ids, in order; `sure` is in 0..1 for each, comparable within a source only."""

    source: Source
    ids: tuple[int, ...]
    sure: tuple[float, ...]
    asked: bool = True  # False: no proposer was asked at all


NOTHING = Proposal("layer", (), (), asked=False)
