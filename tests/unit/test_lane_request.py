import pytest

from laneproto.v1 import lane_pb2 as pb
from lanes import limits
from lanes.errors import BadSampling, ContextExceeded, EmptyPrompt, RequestError, TokenOutOfRange, TooManyStopIds
from lanes.request import Bounds, parse

BOUNDS = Bounds(vocab_size=100, context_tokens=16)


def message(**changes):
    fields = {"request_id": "r1", "prompt_ids": [1, 2, 3], "max_tokens": 4} | changes
    return pb.GenerateRequest(**fields)


def test_a_plain_request():
    request = parse(message(stop_ids=[2, 2], sampling=pb.Sampling(temperature=0.5, seed=2**64 - 1)), BOUNDS)
    assert request.prompt_ids == (1, 2, 3)
    assert request.stop_ids == {2}
    assert request.sampling.top_p == 1.0  # 0 is off
    assert request.sampling.seed == 2**64 - 1


@pytest.mark.parametrize(("tokens", "clipped"), [(1, 1), (13, 13), (14, 13), (2**32 - 1, 13)])
def test_max_tokens_is_clipped_to_the_context(tokens, clipped):
    assert parse(message(max_tokens=tokens), BOUNDS).max_tokens == clipped


def test_prompt_at_the_limit_leaves_one_token_and_past_it_is_refused():
    assert parse(message(prompt_ids=[5] * 15), BOUNDS).max_tokens == 1
    with pytest.raises(ContextExceeded, match="16 tokens; the context of 16 holds at most 15"):
        parse(message(prompt_ids=[5] * 16), BOUNDS)


def test_stop_ids_at_the_limit_and_past_it():
    assert len(parse(message(stop_ids=range(limits.MAX_STOP_IDS)), BOUNDS).stop_ids) == limits.MAX_STOP_IDS
    with pytest.raises(TooManyStopIds):
        parse(message(stop_ids=[1] * (limits.MAX_STOP_IDS + 1)), BOUNDS)


def test_ids_at_the_limit_and_past_it():
    assert parse(message(prompt_ids=[99], stop_ids=[99]), BOUNDS).prompt_ids == (99,)
    for field in ("prompt_ids", "stop_ids"):
        with pytest.raises(TokenOutOfRange, match=f"{field}: 100 is not below"):
            parse(message(**{field: [0, 100]}), BOUNDS)


def test_top_logprobs_at_the_limit_and_past_it():
    assert parse(message(logprobs=True, top_logprobs=20), BOUNDS).top_logprobs == 20
    with pytest.raises(RequestError, match="at most 20"):
        parse(message(logprobs=True, top_logprobs=21), BOUNDS)
    with pytest.raises(RequestError, match="needs logprobs"):
        parse(message(top_logprobs=1), BOUNDS)
    assert parse(message(logprobs=True, top_logprobs=20), Bounds(7, 16)).top_logprobs == 7


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a\nb", "é", "a\x00"])
def test_bad_request_ids(request_id):
    with pytest.raises(RequestError, match="request_id"):
        parse(message(request_id=request_id), BOUNDS)


def test_request_id_at_the_limit():
    assert parse(message(request_id="x" * 64), BOUNDS).request_id == "x" * 64


def test_empty_prompt_and_no_tokens():
    with pytest.raises(EmptyPrompt):
        parse(message(prompt_ids=[]), BOUNDS)
    with pytest.raises(RequestError, match="max_tokens"):
        parse(message(max_tokens=0), BOUNDS)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"temperature": 100.5},
        {"top_p": 1.01},
        {"top_p": -0.5},
        {"top_p": float("nan")},
    ],
)
def test_bad_sampling(sampling):
    with pytest.raises(BadSampling):
        parse(message(sampling=pb.Sampling(**sampling)), BOUNDS)


def test_sampling_at_the_limits():
    sampling = parse(message(sampling=pb.Sampling(temperature=100, top_p=1, top_k=2**32 - 1)), BOUNDS).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (100.0, 1.0, 2**32 - 1)


def test_messages_name_no_token_of_the_prompt():
    with pytest.raises(ContextExceeded) as error:
        parse(message(prompt_ids=[77] * 40), BOUNDS)
    assert "77" not in str(error.value)
