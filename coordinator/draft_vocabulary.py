"""Which ids a draft vocabulary has: the most frequent ones of a text, and what ends an answer. Pure.

Not here: reading texts and packs (cli.draft_vocab), using it (lanes). Invariant: ids are distinct and ascending; the
last tenth of the ids is not counted, so that coverage is told of text that was not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ids, and the share of the tokens that they are, in the counted part of the text and in its last tenth."""

    ids: tuple[int, ...]
    counted: float
    held_out: float


def choose(text_ids: Sequence[int], size: int, always: Iterable[int] = ()) -> Chosen:
    """At most `size` ids, `always` among them; of equally frequent ones the lowest."""
    cut = len(text_ids) - len(text_ids) // 10
    kept = set(sorted(set(always))[:size])
    frequent = sorted(Counter(text_ids[:cut]).items(), key=lambda item: (-item[1], item[0]))
    for token, _ in frequent:
        if len(kept) >= size:
            break
        kept.add(token)
    return Chosen(tuple(sorted(kept)), _share(text_ids[:cut], kept), _share(text_ids[cut:], kept))


def _share(ids: Sequence[int], kept: set[int]) -> float:
    return sum(token in kept for token in ids) / len(ids) if ids else 0.0
