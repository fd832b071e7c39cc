"""What dispatch knows of a request that has not ended, beside where it is.

Not here: the queue and the lanes (dispatch). Invariant: what it was charged and how often it lost its lane stay with it
from lane to lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.generation import Generation
from coordinator.policy.fair_queue import Ticket
from coordinator.policy.placer import Job


@dataclass(slots=True)
class Entry:
    """One request, waiting or running."""

    generation: Generation
    ticket: Ticket
    expiry: asyncio.TimerHandle
    chains: Sequence[bytes]  # of its prompt
    charged: float = 0.0  # tokens, by what placement expected
    losses: int = 0  # lanes lost under it
    could_have_begun: float | None = None  # since when it waits for a busy lane although one was free

    def waited_s(self, now: float) -> float:
        """Although a lane was free; counted from the first time that this is asked."""
        if self.could_have_begun is None:
            self.could_have_begun = now
        return now - self.could_have_begun

    def job(self) -> Job:
        """What is left of it, as placement wants it."""
        request, emitted = self.generation.request, self.generation.tokens_seen
        session = None if request.session is None else f"{request.tenant.name}\0{request.session}"
        return Job(session, len(request.prompt_ids) + emitted, request.max_tokens - emitted, self.chains)
