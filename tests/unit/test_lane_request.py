import pytest

from laneproto.v1 import lane_pb2 as pb
from lanes import limits
from lanes.errors import BadSampling, ContextExceeded, EmptyPrompt, RequestError, TokenOutOfRange, TooManyStopIds
from lanes.request import Bounds, Sampling, parse

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
    wide = Bounds(vocab_size=1000, context_tokens=16)
    assert len(parse(message(stop_ids=range(limits.MAX_STOP_IDS)), wide).stop_ids) == limits.MAX_STOP_IDS
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
        {"min_p": -0.01},
        {"min_p": 1.01},
        {"min_p": float("nan")},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 100.5},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.01},
        {"presence_penalty": -2.01},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 2.01},
        {"frequency_penalty": float("-inf")},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: -100.5}},
        {"logit_bias": {5: float("nan")}},
        {"min_tokens": 5},
    ],
)
def test_bad_sampling(sampling):
    with pytest.raises(BadSampling, match=next(iter(sampling))):
        parse(message(sampling=pb.Sampling(**sampling)), BOUNDS)


def test_defaults_on_the_wire_are_off():
    assert parse(message(), BOUNDS).sampling == Sampling()


def test_penalties_at_their_limits():
    most = pb.Sampling(
        min_p=1, repetition_penalty=100, presence_penalty=2, frequency_penalty=-2, min_tokens=4, logit_bias={0: -100}
    )
    found = parse(message(sampling=most), BOUNDS).sampling
    assert (found.min_p, found.repetition_penalty, found.presence_penalty) == (1.0, 100.0, 2.0)
    assert (found.frequency_penalty, found.min_tokens, found.logit_bias) == (-2.0, 4, ((0, -100.0),))


def test_biases_at_the_limit_and_past_it():
    wide = Bounds(vocab_size=1000, context_tokens=16)
    biases = dict.fromkeys(range(limits.MAX_LOGIT_BIASES), 1.0)
    assert len(parse(message(sampling=pb.Sampling(logit_bias=biases)), wide).sampling.logit_bias) == 300
    with pytest.raises(BadSampling, match="logit_bias: 301 tokens, at most 300"):
        parse(message(sampling=pb.Sampling(logit_bias=biases | {999: 1.0})), wide)


def test_biases_are_of_tokens_in_the_vocabulary_and_ascend():
    found = parse(message(sampling=pb.Sampling(logit_bias={99: 1.0, 4: -1.5})), BOUNDS).sampling
    assert found.logit_bias == ((4, -1.5), (99, 1.0))
    with pytest.raises(TokenOutOfRange, match="logit_bias: 100 is not below"):
        parse(message(sampling=pb.Sampling(logit_bias={100: 1.0})), BOUNDS)


def test_a_minimum_needs_a_token_that_ends_nothing():
    few = Bounds(vocab_size=4, context_tokens=16)
    waits = pb.Sampling(min_tokens=1)
    assert parse(message(stop_ids=[0, 1, 2], sampling=waits), few).sampling.min_tokens == 1
    with pytest.raises(BadSampling, match="every token is a stop id"):
        parse(message(stop_ids=[0, 1, 2, 3], sampling=waits), few)


def test_a_replay_counts_for_max_tokens():
    request = parse(message(prompt_ids=[1, 2, 3, 4], max_tokens=4, replayed_tokens=3), BOUNDS)
    assert (request.max_tokens, request.new_tokens) == (4, 1)
    clipped = parse(message(prompt_ids=[1] * 12, max_tokens=1000, replayed_tokens=5), BOUNDS)
    assert (clipped.max_tokens, clipped.new_tokens) == (9, 4)  # as 7 of prompt leave 9 of 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replayed_tokens": 3}, "fewer than prompt_ids"),
        ({"replayed_tokens": 2**32 - 1}, "fewer than prompt_ids"),
        ({"prompt_ids": [1] * 6, "replayed_tokens": 4}, "has max_tokens already"),
        ({"replayed_tokens": 2, "stop_ids": [2]}, "the answer has ended"),
    ],
)
def test_replays_that_cannot_be(changes, reason):
    with pytest.raises(RequestError, match=f"replayed_tokens: .*{reason}"):
        parse(message(**changes), BOUNDS)


def test_a_stop_id_in_the_prompt_of_a_replay_is_none_of_its_answer():
    assert parse(message(replayed_tokens=2, stop_ids=[1]), BOUNDS).replayed_tokens == 2


def test_sampling_at_the_limits():
    sampling = parse(message(sampling=pb.Sampling(temperature=100, top_p=1, top_k=2**32 - 1)), BOUNDS).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (100.0, 1.0, 2**32 - 1)


def test_messages_name_no_token_of_the_prompt():
    with pytest.raises(ContextExceeded) as error:
        parse(message(prompt_ids=[77] * 40), BOUNDS)
    assert "77" not in str(error.value)


def test_whom_it_interrupts_at_the_limit_and_past_it():
    request = parse(message(interrupts="x" * 64, alone_ms=2**32 - 1), BOUNDS)
    assert (request.interrupts, request.alone_ms) == ("x" * 64, 2**32 - 1)
    assert parse(message(), BOUNDS).interrupts == ""
    for wrong in ("x" * 65, "a\nb", "é"):
        with pytest.raises(RequestError, match="interrupts: at most 64"):
            parse(message(interrupts=wrong), BOUNDS)
