"""A policy with pins: some keys get slots first and keep them; another policy has what is left.

For a draft layer's experts: it is asked several times in a window and always waited for, and its experts are few beside
the decoder's. Pinned only where they take at most SHARE of the slots; else they are cached like any.

Not here: the other policy. Invariants: those of a policy, but that a pin is admitted whether the window touched it or
not; a resident pin is never evicted; the other policy never hears of pins.

Letters: N keys of the model, P pins.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanes.experts.policy import Budget, Ints, Plan, Policy, State, Touched

SHARE = 0.125  # of the slots, at most: what pins cost the other layers in hits stays small (bench/LOG.md)


def with_pins(policy: Policy, pins: Ints) -> Policy:
    """The policy with these keys, ascending [P], pinned where they fit."""

    def decide(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        if pins.shape[0] > SHARE * budget.slots:
            return policy(state, touched, budget)
        new = pins[~state.resident[pins]][: budget.swaps]
        others = state.resident.copy()
        others[pins] = False
        kept = ~np.isin(touched.keys, pins, assume_unique=True)
        rest = replace(budget, slots=budget.slots - pins.shape[0], swaps=budget.swaps - new.shape[0])
        # A start from what an earlier life remembered may have filled the pins' slots: the least used give way.
        over = max(0, int(np.count_nonzero(state.resident)) + new.shape[0] - budget.slots)
        held = np.flatnonzero(others)
        out = np.sort(held[np.argsort(state.uses[held], kind="stable")[:over]])
        others[out] = False
        after, plan = policy(
            replace(state, resident=others), Touched(touched.keys[kept], touched.rows[kept], touched.window_rows), rest
        )
        resident = after.resident.copy()
        resident[pins] = state.resident[pins]
        resident[new] = True
        again = np.isin(plan.admit, out)  # dropped for a pin, and wanted: not both in one plan
        admit = plan.admit[~again]
        resident[plan.admit[again]] = False
        evict = np.concatenate((out, plan.evict))
        return replace(after, resident=resident), Plan(evict, np.concatenate((new, admit)))

    return decide
