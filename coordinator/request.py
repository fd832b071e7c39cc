"""A checked request: what may be queued. Doors hand in a `Draft` of the right types; `check` makes it a `Request` or
says by name which field is wrong.

Not here: wire formats and text (doors, codecs). Invariant: every `Request` is inside `limits` and inside what the model
can do: ids in range, prompt + max_tokens within the context, seed decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.errors import (
    BadRequest,
    ContextLengthExceeded,
    EmptyPrompt,
    OutOfRange,
    TokenOutOfRange,
    Unsupported,
)
from coordinator.lane_view import ModelView
from laneproto.v1 import lane_pb2

_SEED_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn."""

    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Build it with `check`."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]  # the model's end ids among them
    stops: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    session: str | None

    def to_wire(self) -> lane_pb2.GenerateRequest:
        """What a lane is told: neither stop strings nor the session."""
        return lane_pb2.GenerateRequest(
            request_id=self.id,
            prompt_ids=self.prompt_ids,
            max_tokens=self.max_tokens,
            sampling=lane_pb2.Sampling(
                temperature=self.sampling.temperature,
                top_k=self.sampling.top_k,
                top_p=self.sampling.top_p,
                seed=self.sampling.seed,
            ),
            stop_ids=self.stop_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """What a client asked for: types are right, nothing else is checked. None: the client did not say."""

    prompt_ids: Sequence[int]
    prompt_param: str
    default_seed: int
    default_temperature: float
    default_max_tokens: int = limits.DEFAULT_MAX_TOKENS
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    end_ids: Sequence[int] = ()  # of the model and of its chat format, not the client's
    logprobs: bool = False
    top_logprobs: int = 0
    top_logprobs_param: str = "top_logprobs"
    session: str | None = None


def check(draft: Draft, *, request_id: str, model: ModelView) -> Request:
    """The request, or a `RequestError` that names the field."""
    prompt_ids = _prompt(draft.prompt_ids, draft.prompt_param, model)
    return Request(
        id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(draft, len(prompt_ids), model),
        sampling=Sampling(
            temperature=_real(draft.temperature, "temperature", draft.default_temperature, high=limits.TEMPERATURE_MAX),
            top_k=_whole(draft.top_k or 0, "top_k", 0, limits.TOP_K_MAX),
            top_p=_top_p(draft.top_p),
            seed=_seed(draft),
        ),
        stop_ids=_stop_ids(draft, model),
        stops=_stops(draft.stops),
        logprobs=draft.logprobs,
        top_logprobs=_whole(draft.top_logprobs, draft.top_logprobs_param, 0, limits.TOP_LOGPROBS),
        session=check_session(draft.session),
    )


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


def _prompt(ids: Sequence[int], param: str, model: ModelView) -> tuple[int, ...]:
    if not ids:
        raise EmptyPrompt("the prompt has no tokens", param=param)
    if len(ids) >= model.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens; the context of {model.context_tokens} must also hold the answer",
            param=param,
        )
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise TokenOutOfRange(f"token ids go from 0 to {model.vocab_size - 1}", param=param)
    return tuple(ids)


def _max_tokens(draft: Draft, prompt_tokens: int, model: ModelView) -> int:
    wanted = draft.default_max_tokens if draft.max_tokens is None else draft.max_tokens
    _whole(wanted, draft.max_tokens_param, 1, limits.MAX_TOKENS_MAX)
    room = model.context_tokens - prompt_tokens
    return min(wanted, room, model.max_output_tokens or room)


def _whole(value: int, param: str, low: int, high: int) -> int:
    if not low <= value <= high:
        raise OutOfRange(f"{param} must be from {low} to {high}", param=param)
    return value


def _real(value: float | None, param: str, default: float, *, high: float) -> float:
    value = default if value is None else value
    if not math.isfinite(value) or not 0 <= value <= high:
        raise OutOfRange(f"{param} must be a number from 0 to {high:g}", param=param)
    return value


def _top_p(value: float | None) -> float:
    value = _real(value, "top_p", 1.0, high=1.0)
    if value == 0:
        raise OutOfRange("top_p must be over 0 and at most 1", param="top_p")
    return value


def _seed(draft: Draft) -> int:
    if draft.seed is None:
        return draft.default_seed
    # signed seeds are common: the same 64 bits, read as unsigned
    return _whole(draft.seed, "seed", -_SEED_MODULUS // 2, _SEED_MODULUS - 1) % _SEED_MODULUS


def _stop_ids(draft: Draft, model: ModelView) -> tuple[int, ...]:
    if len(draft.stop_ids) > limits.STOP_IDS:
        raise OutOfRange(f"at most {limits.STOP_IDS} stop ids", param="stop_ids")
    if any(not 0 <= stop < model.vocab_size for stop in draft.stop_ids):
        raise TokenOutOfRange(f"token ids go from 0 to {model.vocab_size - 1}", param="stop_ids")
    return tuple(sorted({*model.eos_ids, *draft.end_ids, *draft.stop_ids}))


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > limits.STOPS:
        raise OutOfRange(f"at most {limits.STOPS} stop strings", param="stop")
    for stop in stops:
        if not stop:
            raise OutOfRange("a stop string cannot be empty", param="stop")
        if len(stop.encode()) > limits.STOP_BYTES:
            raise OutOfRange(f"a stop string has at most {limits.STOP_BYTES} bytes", param="stop")
    return tuple(dict.fromkeys(stops))
