"""How a token is drawn, as far as a client may say: what it asked for becomes checked numbers, or an error by name.

Not here: the drawing (the lane's), and what is stopped at (request). Invariant: every number of a `Sampling` is finite
and inside `limits`, its biases are of tokens the model has, and it means the same in fp32, which is what a lane gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from coordinator import limits
from coordinator.errors import OutOfRange, TokenOutOfRange
from coordinator.fleet.lane_view import ModelView
from laneproto.v1 import lane_pb2

_N = TypeVar("_N", int, float)

_SEED_MODULUS = 1 << 64
_FP32_MIN = 2.0**-126  # anything less may be 0 in fp32, which would mean "off"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked. Build it with `check_sampling`."""

    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def to_wire(self) -> lane_pb2.Sampling:
        """As a lane is told."""
        return lane_pb2.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asked for: types are right, nothing else is checked. None: the client did not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a client does not say."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def check_sampling(
    wanted: Wanted, defaults: Defaults, *, default_seed: int, max_tokens: int, model: ModelView
) -> Sampling:
    """The numbers, or a `RequestError` that names the field. `max_tokens` is what the client asked for."""
    temperature = _said(wanted.temperature, defaults.temperature)
    top_k = _said(wanted.top_k, defaults.top_k)
    repetition = _said(wanted.repetition_penalty, defaults.repetition_penalty)
    penalty = limits.PENALTY_MAX
    min_tokens = whole(wanted.min_tokens or 0, "min_tokens", 0, limits.MAX_TOKENS_MAX)
    if min_tokens > max_tokens:
        raise OutOfRange(f"min_tokens must be at most max_tokens, which is {max_tokens}", param="min_tokens")
    return Sampling(
        temperature=_real(temperature, "temperature", 0, limits.TEMPERATURE_MAX),
        top_k=whole(0 if top_k == -1 else top_k, "top_k", 0, limits.TOP_K_MAX),  # vLLM's clients say -1 for "off"
        top_p=_top_p(_said(wanted.top_p, defaults.top_p)),
        seed=_seed(wanted.seed, default_seed),
        min_p=_real(_said(wanted.min_p, defaults.min_p), "min_p", 0, 1),
        repetition_penalty=_real(
            repetition, "repetition_penalty", limits.REPETITION_PENALTY_MIN, limits.REPETITION_PENALTY_MAX
        ),
        presence_penalty=_real(wanted.presence_penalty or 0.0, "presence_penalty", -penalty, penalty),
        frequency_penalty=_real(wanted.frequency_penalty or 0.0, "frequency_penalty", -penalty, penalty),
        logit_bias=_logit_bias(wanted.logit_bias, model),
        min_tokens=min_tokens,
    )


def whole(value: int, param: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if not low <= value <= high:
        raise OutOfRange(f"{param} must be from {low} to {high}", param=param)
    return value


def _said(value: _N | None, default: _N) -> _N:
    return default if value is None else value


def _real(value: float, param: str, low: float, high: float) -> float:
    if not math.isfinite(value) or not low <= value <= high:
        raise OutOfRange(f"{param} must be a number from {low:g} to {high:g}", param=param)
    return value


def _top_p(value: float) -> float:
    if _real(value, "top_p", 0, 1) == 0:
        raise OutOfRange("top_p must be over 0 and at most 1", param="top_p")
    return max(value, _FP32_MIN)


def _seed(seed: int | None, default: int) -> int:
    if seed is None:
        return default
    # signed seeds are common: the same 64 bits, read as unsigned
    return whole(seed, "seed", -_SEED_MODULUS // 2, _SEED_MODULUS - 1) % _SEED_MODULUS


def _logit_bias(biases: Mapping[int, float], model: ModelView) -> tuple[tuple[int, float], ...]:
    if len(biases) > limits.LOGIT_BIASES:
        raise OutOfRange(f"at most {limits.LOGIT_BIASES} tokens may have a bias", param="logit_bias")
    for token, bias in biases.items():
        if not 0 <= token < model.vocab_size:
            raise TokenOutOfRange(f"token ids go from 0 to {model.vocab_size - 1}", param="logit_bias")
        _real(bias, "logit_bias", -limits.BIAS_MAX, limits.BIAS_MAX)
    return tuple(sorted(biases.items()))
