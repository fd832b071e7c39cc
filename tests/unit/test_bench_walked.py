"""Workloads in token ids: as long as stated, along the walk, cold by their first ids alone."""

from itertools import pairwise

import pytest

from bench.load.walked import NONCE_TOKENS, follower, scripts_along, walk_of
from bench.load.workloads import WORKLOADS

PATH = walk_of("small")
script = scripts_along(PATH)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_script_has_the_tokens_of_its_workload_and_is_the_same_every_time(name):
    workload = WORKLOADS[name]
    found = script(workload, 0.05, 1, 0, 0)
    assert found == script(workload, 0.05, 1, 0, 0)
    assert len(found.system) == max(1, round(workload.system_tokens * 0.05))
    for made, given in zip((found.turns, *found.branches), (workload.turns, *workload.branches), strict=True):
        for (ids, turn), stated in zip(made, given, strict=True):
            assert len(ids) == max(1, round(stated.tokens * 0.05))
            assert turn.answer_tokens == max(1, round(stated.answer_tokens * 0.05))
            assert turn.pause_s == stated.pause_s * 0.05


def test_agents_and_conversations_begin_elsewhere_and_share_the_system_prompt():
    workload = WORKLOADS["fiction"]
    first, agent, later, seed = (
        script(workload, 1.0, *which) for which in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0))
    )
    assert first.system == agent.system == later.system != seed.system
    assert len({each.turns[0][0] for each in (first, agent, later, seed)}) == 4


def test_a_nonce_changes_the_first_ids_and_nothing_else():
    plain, one, other = (script(WORKLOADS["code"], 0.1, 1, 0, 0, nonce) for nonce in ("", "a", "b"))
    assert one.system[NONCE_TOKENS:] == other.system[NONCE_TOKENS:] == plain.system
    assert one.system[:NONCE_TOKENS] != other.system[:NONCE_TOKENS]
    assert one.turns == other.turns == plain.turns


def test_a_turn_goes_on_where_the_answer_before_it_ended():
    follow = follower(PATH)
    turns = script(WORKLOADS["repository-fix"], 0.02, 1, 3, 0).turns
    for (before, turn), (after, _) in pairwise(turns):
        answer = follow(before[-1], turn.answer_tokens)
        assert follow(answer[-1], len(after)) == list(after)


def test_the_answer_after_the_walks_last_id_begins_it_again():
    last = int(PATH.order[-1])
    assert follower(PATH)(last, 3) == PATH.order[:3].tolist()
