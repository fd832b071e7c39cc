from __future__ import annotations

import math
from dataclasses import fields as fields_of
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
from coordinator.fleet.lane_view import ModelView
from coordinator.request import Draft, Request, check, check_one, check_session
from coordinator.sampling import Defaults, Sampling, Wanted
from coordinator.tenants import Priority, Tenant

MODEL = ModelView("m", "a", b"", 100, 50, (2, 3), "f32", 0, 40)


SAMPLING_FIELDS = {field.name for field in fields_of(Wanted)}


def checked(**fields: object) -> Request:
    wanted = Wanted(**{name: fields.pop(name) for name in SAMPLING_FIELDS & fields.keys()})  # type: ignore[arg-type]
    draft = Draft(
        prompt_ids=(1, 2), prompt_param="prompt", default_seed=7, defaults=Defaults(temperature=0.5), wanted=wanted
    )
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
        ({"top_k": -2}, OutOfRange, "top_k"),
        ({"min_p": -0.001}, OutOfRange, "min_p"),
        ({"min_p": math.nextafter(1.0, 2)}, OutOfRange, "min_p"),
        ({"min_p": math.nan}, OutOfRange, "min_p"),
        ({"repetition_penalty": 0.0}, OutOfRange, "repetition_penalty"),
        ({"repetition_penalty": 0.0099}, OutOfRange, "repetition_penalty"),
        ({"repetition_penalty": math.nextafter(100, 101)}, OutOfRange, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, OutOfRange, "repetition_penalty"),
        ({"presence_penalty": math.nextafter(2, 3)}, OutOfRange, "presence_penalty"),
        ({"presence_penalty": math.nan}, OutOfRange, "presence_penalty"),
        ({"frequency_penalty": math.nextafter(-2, -3)}, OutOfRange, "frequency_penalty"),
        ({"frequency_penalty": -math.inf}, OutOfRange, "frequency_penalty"),
        ({"logit_bias": {1: math.nextafter(100, 101)}}, OutOfRange, "logit_bias"),
        ({"logit_bias": {1: math.nextafter(-100, -101)}}, OutOfRange, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, OutOfRange, "logit_bias"),
        ({"logit_bias": {100: 1.0}}, TokenOutOfRange, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, TokenOutOfRange, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, OutOfRange, "logit_bias"),
        ({"min_tokens": -1}, OutOfRange, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, OutOfRange, "min_tokens"),
        ({"min_tokens": limits.MAX_TOKENS_MAX + 1}, OutOfRange, "min_tokens"),
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
        {"top_k": -1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {0: 100.0, 99: -100.0}},
        {"min_tokens": 5, "max_tokens": 5},
        {"min_tokens": limits.MAX_TOKENS_MAX, "max_tokens": limits.MAX_TOKENS_MAX},
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


def test_the_number_of_biases_at_the_limit() -> None:
    wide = replace(MODEL, vocab_size=1000)
    for count, accepted in ((limits.LOGIT_BIASES, True), (limits.LOGIT_BIASES + 1, False)):
        draft = Draft((1,), "prompt", 7, Defaults(0.0), Wanted(logit_bias=dict.fromkeys(range(count), 1.0)))
        if accepted:
            assert len(check(draft, request_id="r", model=wide).sampling.logit_bias) == count
        else:
            with pytest.raises(OutOfRange):
                check(draft, request_id="r", model=wide)


def test_a_minimum_is_cut_to_what_the_context_leaves() -> None:
    request = checked(prompt_ids=(1,) * 45, min_tokens=1000, max_tokens=1000)
    assert (request.max_tokens, request.sampling.min_tokens) == (5, 5)


def test_a_minimum_needs_a_token_that_ends_nothing() -> None:
    few = replace(MODEL, vocab_size=4, eos_ids=(0, 1))
    draft = Draft((1,), "prompt", 7, Defaults(0.0), Wanted(min_tokens=1), stop_ids=(2,))
    assert check(draft, request_id="r", model=few).sampling.min_tokens == 1
    with pytest.raises(OutOfRange) as caught:
        check(replace(draft, stop_ids=(2, 3)), request_id="r", model=few)
    assert caught.value.param == "min_tokens"


def test_ignored_ends_leave_the_clients_own() -> None:
    assert checked(stop_ids=(9, 2), end_ids=(5,), ignore_eos=True).stop_ids == (2, 9)
    assert checked(end_ids=(5,), ignore_eos=True).stop_ids == ()


def test_end_ids_that_the_model_does_not_have_end_nothing() -> None:
    assert checked(end_ids=(5, 100, 4_000_000)).stop_ids == (2, 3, 5)


def test_every_number_of_sampling_is_on_the_wire() -> None:
    sampling = Sampling(1.5, 7, 0.75, 11, 0.125, 1.25, -0.5, 0.25, ((3, -1.5), (4, 2.0)), 6)
    wire = sampling.to_wire()
    found = {field.name: getattr(wire, field.name) for field in fields_of(Sampling)}
    assert found | {"logit_bias": tuple(sorted(wire.logit_bias.items()))} == {
        field.name: getattr(sampling, field.name) for field in fields_of(Sampling)
    }
    assert {field.name for field in wire.DESCRIPTOR.fields} == found.keys()


def test_the_smallest_top_p_is_not_off_in_fp32() -> None:
    assert checked(top_p=math.nextafter(0.0, 1)).to_wire().sampling.top_p > 0


def test_what_the_coordinator_accepts_a_lane_accepts() -> None:
    """Limits of both sides, which import nothing of each other."""
    from lanes import limits as lane
    from lanes.request import Bounds, parse

    draft = Draft(
        (1,), "prompt", 7, Defaults(0.0),
        Wanted(2.0, limits.TOP_K_MAX, 1.0, 1.0, -1, 0.01, 2.0, -2.0, dict.fromkeys(range(300), -100.0), 9),
        max_tokens=9, stop_ids=tuple(range(limits.STOP_IDS)), end_ids=tuple(range(900, 900 + limits.END_IDS + 1)),
    )  # fmt: skip
    wide = replace(MODEL, vocab_size=1000, eos_ids=tuple(range(990, 998)))
    wire = check(draft, request_id="r", model=wide).to_wire()
    assert len(wire.stop_ids) <= lane.MAX_STOP_IDS
    assert parse(wire, Bounds(1000, 50)).sampling.min_tokens == 9


def test_a_timeout_is_bounded_and_has_a_default() -> None:
    assert checked().timeout_s == limits.DEFAULT_TIMEOUT_S
    assert checked(timeout_s=0.5).timeout_s == 0.5
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(OutOfRange) as error:
            checked(timeout_s=wrong)
        assert error.value.param == "timeout"


def test_nobody_is_better_than_the_ceiling() -> None:
    tenant = Tenant("t", Priority.DEFAULT)
    wanted = {each: checked(tenant=tenant, priority=each).priority for each in Priority}
    assert wanted == {
        Priority.INTERACTIVE: Priority.DEFAULT,
        Priority.DEFAULT: Priority.DEFAULT,
        Priority.BATCH: Priority.BATCH,
    }
    assert checked(tenant=tenant).tenant is tenant


def test_a_replay_is_told_what_was_sent_already() -> None:
    wire = checked().to_wire([7, 8])
    assert (list(wire.prompt_ids), wire.replayed_tokens, wire.max_tokens) == ([1, 2, 7, 8], 2, 40)
