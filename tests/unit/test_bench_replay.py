"""Replays against undisturbed answers: how far they moved, and where they parted."""

import math

from bench.replay import Parted, Replayed, compare
from laneproto.v1 import lane_pb2


def token(first: int, second: int, margin: float, logprob: float = -0.5) -> lane_pb2.Token:
    top = [lane_pb2.TokenLogprob(id=first, logprob=0.0), lane_pb2.TokenLogprob(id=second, logprob=-margin)]
    return lane_pb2.Token(id=first, logprob=logprob, top=top)


def test_equal_answers_and_near_ties_and_what_is_none() -> None:
    answer = [token(1, 2, 0.5), token(3, 4, 0.25, -0.5), token(5, 6, 0.125)]
    assert compare(answer, 1, [token(3, 4, 0.25, -0.75), token(5, 6, 0.125)]) == Replayed(0.25, None)
    tie = compare(answer, 1, [token(3, 4, 0.25, -0.75), token(6, 5, 0.0625)])
    assert tie == Replayed(0.25, Parted(2, 0.125, 0.1875, 0.25))
    other = compare(answer, 2, [token(9, 5, 0.25)])
    assert other == Replayed(0.0, Parted(2, 0.125, math.inf, 0.0))
