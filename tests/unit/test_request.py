from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator import limits
from coordinator.errors import (
    BadRequest,
    ContextLengthExceeded,
    EmptyPrompt,
    OutOfRange,
    RequestError,
    TokenOutOfRange,
    Unsupported,
)
from coordinator.lane_view import ModelView
from coordinator.request import Draft, Request, check, check_one, check_session

MODEL = ModelView("m", "a", b"", 100, 50, (2, 3), "f32", 0, 40)


def checked(**fields: object) -> Request:
    draft = Draft(prompt_ids=(1, 2), prompt_param="prompt", default_seed=7, default_temperature=0.5)
    return check(replace(draft, **fields), request_id="r", model=MODEL)  # type: ignore[arg-type]


def test_defaults() -> None:
    request = checked()
    assert request.max_tokens == 40  # what the lane gives at most, less than the context leaves
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 0, 1.0, 7)
    assert request.stop_ids == (2, 3)
    assert (request.stops, request.logprobs, request.session) == ((), False, None)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt_ids": ()}, EmptyPrompt, "prompt"),
        ({"prompt_ids": (1,) * 50}, ContextLengthExceeded, "prompt"),
        ({"prompt_ids": (100,)}, TokenOutOfRange, "prompt"),
        ({"prompt_ids": (5, -1)}, TokenOutOfRange, "prompt"),
        ({"max_tokens": 0}, OutOfRange, "max_tokens"),
        ({"max_tokens": limits.MAX_TOKENS_MAX + 1}, OutOfRange, "max_tokens"),
        ({"temperature": -0.001}, OutOfRange, "temperature"),
        ({"temperature": math.nextafter(2.0, 3)}, OutOfRange, "temperature"),
        ({"temperature": math.nan}, OutOfRange, "temperature"),
        ({"temperature": math.inf}, OutOfRange, "temperature"),
        ({"top_p": 0.0}, OutOfRange, "top_p"),
        ({"top_p": math.nextafter(1.0, 2)}, OutOfRange, "top_p"),
        ({"top_p": math.nan}, OutOfRange, "top_p"),
        ({"top_k": -1}, OutOfRange, "top_k"),
        ({"top_k": limits.TOP_K_MAX + 1}, OutOfRange, "top_k"),
        ({"seed": 1 << 64}, OutOfRange, "seed"),
        ({"seed": -(1 << 63) - 1}, OutOfRange, "seed"),
        ({"stops": ("x",) * 17}, OutOfRange, "stop"),
        ({"stops": ("x" * 257,)}, OutOfRange, "stop"),
        ({"stops": ("é" * 129,)}, OutOfRange, "stop"),
        ({"stops": ("",)}, OutOfRange, "stop"),
        ({"stop_ids": (1,) * 65}, OutOfRange, "stop_ids"),
        ({"stop_ids": (100,)}, TokenOutOfRange, "stop_ids"),
        ({"logprobs": True, "top_logprobs": 21}, OutOfRange, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, OutOfRange, "top_logprobs"),
        ({"session": "x" * 257}, BadRequest, "session"),
        ({"session": "a\nb"}, BadRequest, "session"),
        ({"session": "é"}, BadRequest, "session"),
    ],
)
def test_over_the_limit_is_refused_by_name(fields: dict[str, object], error: type[RequestError], param: str) -> None:
    with pytest.raises(error) as caught:
        checked(**fields)
    assert caught.value.param == param
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": (1,) * 49},
        {"prompt_ids": (0, 99)},
        {"max_tokens": 1},
        {"max_tokens": limits.MAX_TOKENS_MAX},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": math.nextafter(0.0, 1)},
        {"top_p": 1.0},
        {"top_k": limits.TOP_K_MAX},
        {"seed": (1 << 64) - 1},
        {"seed": -(1 << 63)},
        {"stops": tuple(f"{n}" for n in range(16))},
        {"stops": ("x" * 256, "é" * 128)},
        {"stop_ids": tuple(range(10, 74))},
        {"logprobs": True, "top_logprobs": 20},
        {"session": "x" * 256},
    ],
)
def test_at_the_limit_is_accepted(fields: dict[str, object]) -> None:
    checked(**fields)


def test_an_answer_never_goes_past_the_context() -> None:
    assert checked(prompt_ids=(1,) * 20, max_tokens=1000).max_tokens == 30
    assert checked(prompt_ids=(1,) * 49, max_tokens=1000).max_tokens == 1
    assert checked(max_tokens=5).max_tokens == 5


def test_signed_seeds_are_the_same_bits() -> None:
    assert checked(seed=-1).sampling.seed == (1 << 64) - 1
    assert checked(seed=0).sampling.seed == 0


def test_end_ids_and_stop_ids_join() -> None:
    assert checked(stop_ids=(9, 2), end_ids=(5,)).stop_ids == (2, 3, 5, 9)


def test_the_wire_carries_neither_session_nor_stop_strings() -> None:
    request = checked(session="who", stops=("halt",), logprobs=True, top_logprobs=3, seed=11, temperature=1.5)
    wire = request.to_wire()
    assert list(wire.prompt_ids) == [1, 2]
    assert (wire.request_id, wire.max_tokens, wire.sampling.seed, wire.sampling.temperature) == ("r", 40, 11, 1.5)
    assert (wire.logprobs, wire.top_logprobs, list(wire.stop_ids)) == (True, 3, [2, 3])
    assert b"who" not in wire.SerializeToString()
    assert b"halt" not in wire.SerializeToString()


def test_only_one_answer_and_plain_sessions() -> None:
    check_one(1, "n")
    with pytest.raises(Unsupported):
        check_one(2, "n")
    assert check_session("") is None
    assert check_session("a-b_c:1") == "a-b_c:1"
