"""What every door offers: the served model, text work, and the way from a checked draft to an answer.

Not here: wire formats. Invariant: ids of requests are made here and nowhere else; a door that got an `Answer` owns it
and cancels it when its client is gone.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from coordinator import limits
from coordinator.answer import Answer
from coordinator.auth import Auth
from coordinator.dispatch import Dispatcher
from coordinator.errors import ModelNotFound, NoLane
from coordinator.fleet.lane_view import LaneView, ModelView, Roster, is_hopeful
from coordinator.generation_config import GenerationConfig
from coordinator.request import Draft, Request, check
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.stats import Door, Recorder, Silent, Timeline
from coordinator.tenants import ANYONE, Priority, Tenant
from coordinator.text.desk import TextDesk
from laneproto.chain import chain

# A seed is reported in JSON, where many readers keep no more than 53 bits of an integer.
_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    request_id: str
    tenant: Tenant = ANYONE
    session: str | None = None
    parent_session: str | None = None
    priority: Priority = Priority.DEFAULT
    timeout_s: float | None = None
    trace_parent: str = ""  # of the client's own span; empty: none


class Serving:
    """One per coordinator, shared by its doors."""

    def __init__(
        self,
        roster: Roster,
        dispatcher: Dispatcher,
        text: TextDesk,
        generation: GenerationConfig | None = None,
        recorder: Recorder | None = None,
        journal: Journal | None = None,
        auth: Auth | None = None,
    ) -> None:
        self._roster = roster
        self.dispatcher = dispatcher
        self.text = text
        self.generation = generation or GenerationConfig()
        self.recorder = recorder or Silent()
        self.journal = journal or Journal()
        self.auth = auth or Auth()
        self._model: ModelView | None = None
        self._unsubscribe = roster.subscribe(self._look)
        self._look()

    def close(self) -> None:
        """Looks at lanes no more."""
        self._unsubscribe()
        self.text.close()

    def _look(self) -> None:
        models = (view.model for view in self._roster.lanes() if view.model is not None)
        self._model = next(models, self._model)

    def lanes(self) -> list[LaneView]:
        """All lanes."""
        return list(self._roster.lanes())

    def ready(self) -> bool:
        """Whether a lane serves now."""
        return any(view.state == "ready" for view in self._roster.lanes())

    @property
    def known_model(self) -> ModelView | None:
        """What the lanes say that they serve, or said last; None until one was ready."""
        return self._model

    def model(self) -> ModelView:
        """What is served: what the lanes say, or said last. `NoLane` until one was ready."""
        if self._model is None:
            starting = any(map(is_hopeful, self._roster.lanes()))
            raise NoLane("no lane has been ready yet" if starting else "no lane is in service")
        return self._model

    def check_model(self, name: str | None) -> ModelView:
        """The model, if it is the one that was asked for; a client need not name it."""
        model = self.model()
        if name is not None and name != model.name:
            raise ModelNotFound("this server has no such model; GET /v1/models names the one it has", param="model")
        return model

    def new_seed(self) -> int:
        """For a request that names none."""
        return secrets.randbits(_SEED_BITS)

    async def submit(self, draft: Draft, caller: Caller, door: Door) -> Answer:
        """Checks and queues. Raises `RequestError`, or `Refused` when there is no place or no lane."""
        model = self.model()
        request, chains = await self.text.off_loop(
            len(draft.prompt_ids), limits.INLINE_PROMPT_TOKENS, lambda: self._checked(draft, caller.request_id, model)
        )
        record = self.journal.record(request, door, time.monotonic(), caller.trace_parent)
        timeline = Timeline(self.recorder, door, time.monotonic, record, self.journal.ended)
        answer = Answer(self.dispatcher.submit(request, timeline, chains), self.text.detokenizer())
        self.journal.opened(record)
        return answer

    def _checked(self, draft: Draft, request_id: str, model: ModelView) -> tuple[Request, list[bytes]]:
        """The request and the chain of its prompt: what looks at every token."""
        request = check(draft, request_id=request_id, model=model)
        request = replace(request, checkpoints=self.text.boundaries(request.prompt_ids))
        return request, chain(request.prompt_ids, request.tenant.salt)
