"""The rule for reading prompts (lanes.reading) with the numbers of one lane: its cache, its uses, its pace.

Not here: the rule, measuring. Invariant: what is asked during a window looks at host tables only.

Letters: L decoder layers, E experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanes.experts.adaptive import remembered
from lanes.experts.cache import ExpertCache
from lanes.experts.demand import Floats, chances, expected, hottest
from lanes.experts.gpu.prompt import RING_SHARE, Means
from lanes.reading import WINDOW_ROWS, Asked, Choice, Pace, Preludes, Room, cheapest, ring_slots, windows_up_to
from shared_experts.manifest import ExpertsInfo


class Reading:
    """Of one lane, once its pace is known."""

    def __init__(
        self, cache: ExpertCache, info: ExpertsInfo, chosen: int, pace: Pace, preludes: Preludes | None = None
    ) -> None:
        """`chosen` is how many experts a row has in a layer; `preludes` go on being told of passes."""
        self._cache, self._info, self._chosen, self.pace = cache, info, chosen, pace
        self._preludes = Preludes() if preludes is None else preludes
        self._layers = info.layers - info.draft_layers

    def feeding(self, rows: int) -> Means:
        """How a pass of so many rows is fed, as the cache is now."""
        room = self._room(rows)
        asked = self._asked(rows, self._chances(), self._cache.resident[: self._layers])
        return Means(cheapest(asked, room, self.pace, ("chosen", "ahead")).way == "ahead", room.ring_slots)

    def windows_up_to(self) -> tuple[int, Choice]:
        """(rows, the choice one window further): parts of a prompt of at most so many rows are decode windows'.

        The cache is taken to hold what was used most, however much of that has arrived yet.
        """
        chance = self._chances()
        resident = hottest(chance, self._cache.room)
        return windows_up_to(lambda rows: self._asked(rows, chance, resident), self._room(WINDOW_ROWS), self.pace)

    def _room(self, rows: int) -> Room:
        wanted = ring_slots(rows, self._layers, self._info.record_bytes, self.pace, self._preludes.of(rows))
        return Room(self._layers, self._info.record_bytes, min(wanted, self._cache.room // RING_SHARE))

    def _chances(self) -> Floats:
        """[L, E]."""
        uses = remembered(self._cache.state).reshape(self._info.layers, self._info.experts)
        return chances(uses[: self._layers], self._chosen)

    @staticmethod
    def _asked(rows: int, chance: Floats, resident: npt.NDArray[np.bool_]) -> Asked:
        def missed(count: int) -> float:
            return float(expected(chance, count)[~resident].sum())

        whole, rest = divmod(rows, WINDOW_ROWS)
        windows = whole * missed(WINDOW_ROWS) + (missed(rest) if rest else 0.0)
        return Asked(rows, missed(rows), windows, float((~resident).sum()))
