"""One generation that a lane has accepted: its request, the way to its reader, and what is known of it so far.

Not here: its steps (steps), and which generation's step is next (engine, turns). Invariant: `cancel` may be called from
any thread; everything else is written by the engine's thread, or before that has it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from lanes.counters import Counters
from lanes.outbox import Outbox
from lanes.request import Request
from lanes.state.conversations import Begun

_NOWHERE = Begun(-1)


@dataclass(slots=True, eq=False)
class Generation:
    """Accepted, and not yet ended."""

    request: Request
    outbox: Outbox
    begun: Begun = _NOWHERE  # where in the prompt it began
    sent: int = 0  # tokens
    reading: bool = True  # its prompt; another one may run between two chunks
    waited_windows: int = 0  # of others, since it was accepted and before its own first
    before: Counters = field(default_factory=Counters)  # what was counted by others, or before it began
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Asks for its end at the next safe point."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """Whether its end was asked for."""
        return self._cancelled.is_set()
