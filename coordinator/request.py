"""A checked request: what may be queued. Doors hand in a `Draft` of the right types; `check` makes it a `Request` or
says by name which field is wrong.

Not here: wire formats and text (doors, codecs), how a token is drawn (sampling). Invariant: every `Request` is inside
`limits` and inside what the model can do: ids in range, prompt + max_tokens within the context, seed decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator import limits
from coordinator.context_limit import too_long
from coordinator.errors import (
    BadRequest,
    EmptyPrompt,
    OutOfRange,
    TokenOutOfRange,
    Unsupported,
)
from coordinator.fleet.lane_view import ModelView
from coordinator.sampling import Defaults, Sampling, Wanted, check_sampling, whole
from coordinator.tenants import ANYONE, Priority, Tenant
from laneproto.v1 import lane_pb2


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Build it with `check`."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]  # the model's end ids among them, unless they are to be ignored
    stops: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    session: str | None
    grammar: str = ""  # what the output may be; empty: anything
    parent_session: str | None = None  # of the agent that started this session's agent
    tenant: Tenant = ANYONE
    priority: Priority = Priority.DEFAULT  # never better than the tenant's ceiling
    timeout_s: float = limits.DEFAULT_TIMEOUT_S  # from the queue to the last token
    checkpoints: tuple[int, ...] = ()  # numbers of prompt tokens after which a later prompt may differ

    def to_wire(self, emitted: Sequence[int] = ()) -> lane_pb2.GenerateRequest:
        """What a lane is told: neither stop strings nor whose it is. `emitted` of a lane that was lost are output."""
        return lane_pb2.GenerateRequest(
            request_id=self.id,
            prompt_ids=(*self.prompt_ids, *emitted),
            replayed_tokens=len(emitted),
            max_tokens=self.max_tokens,
            sampling=self.sampling.to_wire(),
            stop_ids=self.stop_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            checkpoint_positions=self.checkpoints,
            tenant_salt=self.tenant.salt,
            grammar=self.grammar,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """What a client asked for: types are right, nothing else is checked. None: the client did not say."""

    prompt_ids: Sequence[int]
    prompt_param: str
    default_seed: int
    defaults: Defaults
    wanted: Wanted
    default_max_tokens: int = limits.DEFAULT_MAX_TOKENS
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    stop_ids_param: str = "stop_ids"
    end_ids: Sequence[int] = ()  # of the model and of its chat format, not the client's
    ignore_eos: bool = False  # then none of these end the answer
    grammar: str = ""
    logprobs: bool = False
    top_logprobs: int = 0
    top_logprobs_param: str = "top_logprobs"
    session: str | None = None
    parent_session: str | None = None
    tenant: Tenant = ANYONE
    priority: Priority = Priority.DEFAULT  # what was asked for; the tenant's ceiling bounds it
    timeout_s: float | None = None  # None: the default


def check(draft: Draft, *, request_id: str, model: ModelView) -> Request:
    """The request, or a `RequestError` that names the field."""
    prompt_ids = check_prompt(
        draft.prompt_ids, draft.prompt_param, context_tokens=model.context_tokens, vocab_size=model.vocab_size
    )
    max_tokens = draft.default_max_tokens if draft.max_tokens is None else draft.max_tokens
    whole(max_tokens, draft.max_tokens_param, 1, limits.MAX_TOKENS_MAX)
    stop_ids = _stop_ids(draft, model)
    sampling = check_sampling(
        draft.wanted, draft.defaults, default_seed=draft.default_seed, max_tokens=max_tokens, model=model
    )
    if sampling.min_tokens and len(stop_ids) == model.vocab_size:
        raise OutOfRange("min_tokens cannot be kept: every token is a stop id", param="min_tokens")
    room = model.context_tokens - len(prompt_ids)
    max_tokens = min(max_tokens, room, model.max_output_tokens or room)
    return Request(
        id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        sampling=replace(sampling, min_tokens=min(sampling.min_tokens, max_tokens)),
        stop_ids=stop_ids,
        stops=_stops(draft.stops),
        logprobs=draft.logprobs,
        top_logprobs=whole(draft.top_logprobs, draft.top_logprobs_param, 0, limits.TOP_LOGPROBS),
        grammar=draft.grammar,
        session=check_session(draft.session),
        parent_session=check_session(draft.parent_session, "parent_session"),
        tenant=draft.tenant,
        priority=max(draft.priority, draft.tenant.ceiling),
        timeout_s=check_timeout(draft.timeout_s),
    )


def check_timeout(timeout_s: float | None, param: str = "timeout") -> float:
    """Seconds from the queue to the last token: a client's own, or the default."""
    if timeout_s is None:
        return limits.DEFAULT_TIMEOUT_S
    if not 0 < timeout_s <= limits.TIMEOUT_MAX_S:  # NaN is neither
        raise OutOfRange(f"a timeout is over 0 and at most {limits.TIMEOUT_MAX_S:g} seconds", param=param)
    return timeout_s


def check_session(session: str | None, param: str = "session") -> str | None:
    """A session id: printable ASCII, bounded. Empty is none."""
    if not session:
        return None
    if len(session) > limits.SESSION_CHARS or not session.isascii() or not session.isprintable():
        raise BadRequest(f"a session id has at most {limits.SESSION_CHARS} printable ASCII characters", param=param)
    return session


def check_one(value: int, param: str) -> None:
    """For counts of answers per request: only one is served."""
    if value != 1:
        raise Unsupported(f"{param} must be 1", param=param)


def check_prompt(ids: Sequence[int], param: str, *, context_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids that a model can be asked."""
    if not ids:
        raise EmptyPrompt("the prompt has no tokens", param=param)
    if len(ids) >= context_tokens:
        raise too_long(f"{len(ids)} tokens", context_tokens=context_tokens, param=param)
    known = tuple(ids)  # first: looking through a message's own list takes three times as long
    if min(known) < 0 or max(known) >= vocab_size:
        raise TokenOutOfRange(f"token ids go from 0 to {vocab_size - 1}", param=param)
    return known


def _stop_ids(draft: Draft, model: ModelView) -> tuple[int, ...]:
    if len(draft.stop_ids) > limits.STOP_IDS:
        raise OutOfRange(f"at most {limits.STOP_IDS} stop ids", param=draft.stop_ids_param)
    if any(not 0 <= stop < model.vocab_size for stop in draft.stop_ids):
        raise TokenOutOfRange(f"token ids go from 0 to {model.vocab_size - 1}", param=draft.stop_ids_param)
    end_ids = () if draft.ignore_eos else (*model.eos_ids, *(end for end in draft.end_ids if end < model.vocab_size))
    return tuple(sorted({*end_ids, *draft.stop_ids}))


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > limits.STOPS:
        raise OutOfRange(f"at most {limits.STOPS} stop strings", param="stop")
    for stop in stops:
        if not stop:
            raise OutOfRange("a stop string cannot be empty", param="stop")
        if len(stop.encode()) > limits.STOP_BYTES:
            raise OutOfRange(f"a stop string has at most {limits.STOP_BYTES} bytes", param="stop")
    return tuple(dict.fromkeys(stops))
