"""Resident-only routing against a plain spelling of it, and the words in which an answer admits it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.answer import Final
from coordinator.apis.approximate import prompt_routing
from coordinator.apis.openai.answers import usage_body
from coordinator.chat import TurnEnd
from laneproto.v1 import lane_pb2
from lanes.counters import Counters
from lanes.models.near import Near, route_near
from lanes.models.qwen4_exp.moe import route


def spelt_out(logits, resident, k, normalise):
    """One row after another, in fp64."""
    chosen, weighed, replaced = [], [], 0
    for row in logits.double():
        p = row.softmax(0).tolist()
        exact = sorted(range(len(p)), key=lambda e: (-p[e], e))[:k]
        near = [e for e in sorted(range(len(p)), key=lambda e: (-p[e], e)) if resident[e]][:k]
        if sum(resident) < k:
            near = exact
        total = 1.0 if normalise else sum(p[e] for e in exact)
        mine = sum(p[e] for e in near)
        ids = sorted(near)
        scale = total / mine if normalise or set(near) != set(exact) else 1.0
        chosen.append(ids)
        weighed.append([p[e] * scale for e in ids])
        replaced += len(set(exact) - set(near))
    return chosen, weighed, replaced


@given(st.integers(0, 10_000), st.integers(1, 4), st.floats(0, 1), st.booleans())
def test_equals_the_plain_spelling(seed, k, share, normalise):
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(0, 2, (5, 12)).astype(np.float32))
    resident = torch.from_numpy(generator.random(12) < share)
    ids, weights, replaced = route_near(logits, resident, k, normalise)
    chosen, weighed, expected = spelt_out(logits, resident.tolist(), k, normalise)
    assert ids.tolist() == chosen
    torch.testing.assert_close(weights.double(), torch.tensor(weighed).double(), rtol=1e-5, atol=1e-7)
    assert replaced == expected


@pytest.mark.parametrize("normalise", [True, False])
def test_what_is_all_there_is_exact_to_the_bit(normalise):
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(3)) * 3
    ids, weights = route(logits, 4, normalise)
    resident = torch.zeros(16, dtype=torch.bool)
    resident[ids[:25].unique()] = True
    near_ids, near_weights, _ = route_near(logits, resident, 4, normalise)
    same = resident[ids].all(1)
    assert same[:25].all()
    assert torch.equal(near_ids[same], ids[same])
    assert torch.equal(near_weights[same], weights[same])
    assert resident[near_ids].all()


def test_fewer_residents_than_choices_are_not_forced_on_anybody():
    logits, resident = torch.randn(5, 16), torch.zeros(16, dtype=torch.bool)
    resident[:3] = True
    ids, weights, replaced = route_near(logits, resident, 4, True)
    assert torch.equal(ids, route(logits, 4, True)[0])
    assert torch.equal(weights, route(logits, 4, True)[1])
    assert replaced == 0
    resident[3] = True
    assert route_near(logits, resident, 4, True)[0].tolist() == [[0, 1, 2, 3]] * 5


def test_residents_of_no_probability_still_come_first_and_weights_are_finite():
    logits = torch.full((1, 8), -1e4)
    logits[0, 7] = 0.0
    resident = torch.tensor([True, True, False, False, False, False, False, False])
    ids, weights, replaced = route_near(logits, resident, 2, True)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]
    assert replaced == 1, "0 would have been chosen anyway"


def test_counts():
    counters = Counters()
    near = Near(lambda layer: torch.tensor([True, False, True, True]), counters)
    near.route(0, torch.tensor([[1.0, 9.0, 0.0, 0.5], [5.0, 0.0, 4.0, 0.0]]), 2, True)
    assert (counters.prompt_choices, counters.replaced_choices) == (4, 1)


def test_an_exact_answer_says_nothing_of_it():
    assert prompt_routing(lane_pb2.Usage(prompt_tokens=4)) == {}
    usage = lane_pb2.Usage(
        prompt_tokens=4, approximations=["kv-int8", "prefill-routing-vram"], prompt_choices=80, replaced_choices=3
    )
    said = {"routing": "vram", "choices": 80, "replaced_choices": 3}
    end = TurnEnd(Final(lane_pb2.FINISH_REASON_STOP, usage, lane_pb2.Counters(), "lane-0", False), called=False)
    assert usage_body(end)["prompt_routing"] == said
