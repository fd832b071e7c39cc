"""Tasks that end together: the background tasks of one owner, and waits of which the first to end ends the others.

Invariant: after `cancel`, and after `first`, none of them runs, however many began meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """The tasks that somebody has begun and that have not ended yet."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin; the loop itself would keep only a weak reference."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """End all of them, and those that they begin while they end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # tasks leave the set in the loop's next turn


async def first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them has ended, however it did; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
