"""Guesses that the device makes by itself, each the next one's input, against the same ones asked for one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import triton

from bench import exactness_guesses
from bench.exactness_cases import Ground
from bench.gpu_lane_rig import CONTEXT, gpu_lane, small_pack
from lanes import limits
from lanes.models.qwen4_exp.gpu import guessing
from lanes.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("one_thread", "large_tiles"),
]
IDS = [7, 8, 9, 30, 31, 200, 12, 13, 14]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    with small_pack(tmp_path_factory.mktemp("pack")) as pack:
        yield pack


@pytest.mark.slow
def test_guesses_at_once_are_those_one_by_one(pack):
    ids = [*IDS, 40, 281, 228, 147, 160, 251]
    assert exactness_guesses.at_once(Ground(pack, "cpu", ids, len(IDS), CONTEXT)) == "14 guesses"


def test_the_device_names_tokens_of_a_draft_vocabulary(pack):
    lane, vocabulary = gpu_lane(pack, drafts=True), tuple(range(5, 290, 3))
    state = lane.states[lane.begin(IDS)]
    lane.model.narrow_guesses(vocabulary)
    lane.model.guess(state, 9, 0)  # from here on one row waits
    (first, second), token = lane.model.guess(state, 40, 0, best=2), 40
    for number, each in enumerate((first, second)):
        assert lane.model.guess(state, token, number, best=1) == [each]
        token = vocabulary[each[0]]


def test_what_is_no_number_ends_the_chain(pack):
    lane = gpu_lane(pack, drafts=True)
    state, head = lane.states[lane.begin(IDS)], lane.model._guessing._pass._head
    wrong = head[5].clone()
    assert lane.model.guess(state, 40, 0, best=2)[1][0] >= 0
    asked = lane.model._guessing._pass
    run = asked.run

    def spoilt(rows, number, *, named=False):
        head[5] = float("nan") if number == 1 else wrong
        run(rows, number, named=named)

    asked.run = spoilt
    found = lane.model.guess(state, 40, 0, best=3)
    assert found[0][0] >= 0
    assert found[1:] == [(-1, 0.0)] * 2
    head[5] = wrong


def test_a_layer_whose_embedding_no_kernel_reads_guesses_one_by_one(pack, monkeypatch):
    lane = gpu_lane(pack, drafts=True)
    state = lane.states[lane.begin(IDS)]
    lane.model.guess(state, 9, 0)  # from here on one row waits
    want = lane.model.guess(state, 40, 0, best=3)
    monkeypatch.setattr(lane.model._guessing, "chains", False)
    assert not lane.model.chains
    assert lane.model.guess(state, 40, 0, best=3) == want[:1]
    assert lane.model.guess(state, want[0][0], 1, best=2) == want[1:2]


def test_the_host_has_something_else_to_do_while_guesses_run(pack, monkeypatch):
    lane, order = gpu_lane(pack, drafts=True), []
    slot, guessing_, runner = lane.begin(IDS), lane.model._guessing, ModelRunner(lane.model, lane.states, lane.experts)
    launch = guessing_._launch
    monkeypatch.setattr(guessing_, "_launch", lambda which: (order.append(which), launch(which)))
    monkeypatch.setattr(guessing_, "_stream", SimpleNamespace(synchronize=lambda: order.append("wait")))
    assert len(runner.guess(slot, 40, 0, 2, lambda: order.append("meanwhile"))) == 2
    assert order[1:] == [(1, 1, True), "meanwhile", "wait"]
    order.clear()
    lane.experts.stopped = lambda: True
    assert runner.guess(slot, 40, 0, 2, lambda: order.append("meanwhile")) is None
    assert not order, "nothing began"


@pytest.mark.slow
def test_what_was_said_while_the_window_ran_is_what_the_guess_would_say(pack, monkeypatch):
    lane = gpu_lane(pack, drafts=True)
    slot, guessing_ = lane.begin(IDS), lane.model._guessing
    state, said, anew = lane.states[slot], guessing_._said, []
    say = guessing_._say
    monkeypatch.setattr(guessing_, "_say", lambda to, ids, start: (anew.append(ids), say(to, ids, start)))

    def guessed(token, want_anew):
        anew.clear()
        lane.model.guess(state, token, 0, best=1)
        assert len(anew) == want_anew
        start, ids = guessing_._told
        assert start == state.length - len(ids)
        found = [part.copy() for part in (said.length, said.embedded[: len(ids)], said.angles[:, : len(ids)])]
        for part in (said.length, said.embedded, said.angles):
            part[:] = 0
        say(said, ids, start)
        for mine, its in zip(found, (said.length, said.embedded[: len(ids)], said.angles[:, : len(ids)]), strict=True):
            assert np.array_equal(mine, its)
        return ids

    guessed(40, 1)  # behind a prompt
    token = 40
    for tokens, right in (([41, 42, 43], 3), ([8, 9], 3), ([12], 1), ([], 1)):
        lane.experts.end_window()
        lane.trial([token, *tokens], slot, right)
        token = 60 + right
        assert guessed(token, 0) == [*tokens[: right - 1], token]
    assert guessed(7, 0) == [7], "the same row, another token"
    lane.experts.end_window()
    lane.trial([7, 8], slot, 2)
    assert guessed(9, 0) == [8, 9]
    assert guessed(9, 1) == [9], "of two rows one waits"
    lane.experts.end_window()
    lane.trial([5, 6], slot, 1)  # not what was guessed about: the row before waits, too
    assert guessed(14, 1) == [5, 14]
    lane.model.erase()
    assert guessing_._told == (-1, [])
    assert guessing_._ids is lane.model._context is None, "nobody holds what a sequence has given up"


def test_all_passes_are_there_for_graphs():
    assert len({*guessing.FIRST, *guessing.FURTHER, *guessing.NAMED}) == 4 + 2 * (limits.MAX_DRAFTS - 1)
