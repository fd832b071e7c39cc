"""Resident-only routing: while a prompt is read, tokens choose among the experts of the lane's cache. Approximate.

    p = softmax(logits); the K greatest of the resident experts' p, scaled to the sum that the K greatest of all have

Off by default, and then nothing here runs. Not here: which experts are resident (cache), which windows are steered
(steps: prompt chunks, never replayed output or decode windows).

Invariant: a layer of which fewer than K experts are resident is routed exactly; a row whose K greatest are all resident
chooses what it would have chosen, with the same weights to the bit. Residency does not change within a window.

Letters: R rows, E experts of a layer, K experts per row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lanes.counters import Counters
from lanes.models.ops import top_lowest

_LEAST = torch.finfo(torch.float32).tiny


class Near:
    """Routes the rows of a prompt; one engine's thread uses it."""

    def __init__(self, resident: Callable[[int], torch.Tensor], counters: Counters) -> None:
        """`resident` gives a layer's experts that need no transfer, bool [E] on the model's device."""
        self._resident, self._counters = resident, counters

    def route(self, layer: int, logits: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [R, K] ascending, weights fp32 [R, K]) for router logits [R, E]; counts what was replaced."""
        resident = self._resident(layer)
        ids, weights, replaced = route_near(logits, resident, k, normalise)
        self._counters.prompt_choices += ids.numel()
        self._counters.replaced_choices += replaced
        return ids, weights


def route_near(
    logits: torch.Tensor, resident: torch.Tensor, k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, weights as above, choices that differ from the exact ones); ties take the lowest id."""
    probabilities = logits.softmax(-1)
    ids = top_lowest(probabilities, k)
    weights = probabilities.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    away = ~resident[ids]  # [R, K]
    replaced = int(away.sum())
    if not replaced or int(resident.sum()) < k:
        return ids, weights, 0
    # A resident expert of no probability at all still comes before one that is not there.
    open_to_choice = torch.where(resident, probabilities.clamp_min(_LEAST), torch.zeros_like(probabilities))
    near = top_lowest(open_to_choice, k)
    chosen = open_to_choice.gather(1, near)
    total = weights.sum(-1, keepdim=True)
    changed = away.any(1, keepdim=True)
    near_weights = chosen / chosen.sum(-1, keepdim=True) * total
    return torch.where(changed, near, ids), torch.where(changed, near_weights, weights), replaced
