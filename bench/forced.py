"""A cache that holds a chosen set of experts, for step times at a hit rate that no policy would give: a `Policy`.

The set is the hottest pairs of the very conversation that is measured, counted in an earlier pass, and as many of them
as the rate asks for. So a figure at a forced rate says what a step costs, not what a cache reaches.
Invariant: within the budget of slots; what is wanted comes at once, touched or not, so that no pass is lost to waiting.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lanes.experts.policy import Budget, Ints, Plan, State, Touched


class Held:
    """Keeps `wanted` and nothing else; between two conversations `wanted` may be replaced."""

    def __init__(self, pairs: int) -> None:
        self.wanted: npt.NDArray[np.bool_] = np.zeros(pairs, np.bool_)
        self.missing = 0  # of the wanted ones, after the last window

    def want(self, keys: Ints) -> None:
        """From the next window on, these keys."""
        self.wanted = np.zeros_like(self.wanted)
        self.wanted[keys] = True
        self.missing = len(keys)

    def __call__(self, state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        """Drops what is not wanted, admits what is, but for windows that are told to admit nothing."""
        evict = np.flatnonzero(state.resident & ~self.wanted)
        free = budget.slots - int(np.count_nonzero(state.resident)) + len(evict)
        admit = np.flatnonzero(self.wanted & ~state.resident)[: max(0, free) * (budget.swaps > 0)]
        resident = state.resident.copy()
        resident[evict] = False
        resident[admit] = True
        self.missing = int(np.count_nonzero(self.wanted & ~resident))
        return replace(state, windows=state.windows + 1, resident=resident), Plan(evict, admit)


def hottest(uses: Ints, rate: float) -> Ints:
    """The fewest keys that take at least `rate` of all uses [pairs], ascending; only keys that were used."""
    order = np.argsort(-uses, kind="stable")
    share = np.cumsum(uses[order]) / max(1, int(uses.sum()))
    count = min(int(np.searchsorted(share, rate - 1e-12)) + 1, int(np.count_nonzero(uses)))
    return np.sort(order[:count]) if rate > 0 else order[:0]
