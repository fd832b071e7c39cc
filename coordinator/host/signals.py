"""What a supervisor was told by signals: the first one stops it in order, a second one at once.

Not here: what stopping means (cluster, member). Invariant: a signal cancels nothing by itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Signals:
    """Of this process; `listen` belongs to its event loop."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)
    first: int = 0

    def listen(self) -> None:
        """From now on, a signal cancels nothing by itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._received, number)

    async def heed(self, life: Coroutine[Any, Any, None]) -> None:
        """Run `life`, which ends only by an error, until that error or the first signal; nothing of it is left."""
        living, stopping = asyncio.create_task(life), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
        finally:
            living.cancel()
            stopping.cancel()
            await asyncio.gather(living, stopping, return_exceptions=True)

    def _received(self, number: int) -> None:
        if self.stop.is_set():
            self.now.set()
        self.first = self.first or number
        self.stop.set()
