"""A cache policy that says what a test wrote down, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lanes.experts.policy import Budget, Plan, Policy, State, Touched


def scripted(*plans: tuple[Sequence[int], Sequence[int]]) -> Policy:
    """(evict, admit) of each window in turn."""

    def policy(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        evict, admit = plans[state.windows]
        resident = state.resident.copy()
        resident[evict], resident[admit] = False, True
        plan = Plan(np.array(evict, np.int64), np.array(admit, np.int64))
        return replace(state, windows=state.windows + 1, resident=resident), plan

    return policy
