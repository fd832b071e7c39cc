"""How many experts so many rows will choose, and how many of those are not in the cache: expected values. Pure.

A row is taken to choose each expert of a layer on its own, as often as earlier rows did; rows of one text choose more
alike than that, so these are upper bounds. Not here: who counts uses (adaptive), what follows (lanes.reading).

Letters: L layers, E experts, K experts per row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def chances(uses: npt.NDArray[np.floating], chosen: int) -> Floats:
    """That a row chooses an expert, [L, E], from how often each was used (any unit, at least 0), and `chosen` = K.

    One row's worth of uses, spread evenly, is added: what nobody has chosen yet may still come.
    """
    prior = chosen / uses.shape[1]
    seen = uses.astype(np.float64) + prior
    found: Floats = np.minimum(1.0, chosen * seen / seen.sum(axis=1, keepdims=True))
    return found


def expected(chance: Floats, rows: int) -> Floats:
    """Of each expert: that any of the rows chooses it, [L, E]."""
    return 1.0 - (1.0 - chance) ** rows


def hottest(chance: Floats, slots: int) -> npt.NDArray[np.bool_]:
    """Which experts, [L, E], a cache of so many slots holds in the long run; of equal ones the lowest."""
    kept = np.zeros(chance.size, np.bool_)
    kept[np.argsort(-chance, axis=None, kind="stable")[:slots]] = True
    return kept.reshape(chance.shape)
