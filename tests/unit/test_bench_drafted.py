"""`bench.drafted`: the oracle's dice are thrown before an answer, the share named first is measured first."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench import drafted
from bench.drafted import Oracle, Tally, measured, thrown
from bench.synthetic.walk import walk
from lanes.drafts.policy import Beliefs
from lanes.runner import Likeliest

WALK = walk(3000, 4)


@pytest.mark.parametrize("graded", [False, True])
def test_what_is_thrown_is_the_seeds_and_of_the_share(graded):
    ids = WALK.stretch(5, 400)
    said = thrown(WALK, ids, 0.75, 3, graded=graded)
    assert list(said) == ids
    assert thrown(WALK, ids, 0.75, 3, graded=graded) == said
    assert thrown(WALK, ids, 0.75, 4, graded=graded) != said
    right = [said[token].place == int(WALK.successor[token]) for token in ids]
    next_ = WALK.successor
    assert all(each.place in (next_[token], next_[next_[token]]) for token, each in said.items())
    assert abs(np.mean(right) - 0.75) < 0.08
    if graded:
        sure = np.array([said[token].share for token in ids])
        assert np.mean(np.array(right)[sure > 0.8]) > np.mean(np.array(right)[sure < 0.6]) + 0.2
    else:
        assert {each.share for each in said.values()} == {1.0}
        assert sum(right) == 300
    always = thrown(WALK, ids, 1.0, 1)
    assert all(each.place == WALK.successor[token] for token, each in always.items())


def test_an_oracle_goes_on_from_what_it_said_and_knows_how_often_it_was_right():
    ids = WALK.stretch(0, 60)
    said, asked = thrown(WALK, ids, 0.6, 1), []

    def layer(slot, token, number, best, meanwhile):
        asked.append((token, best))
        return [Likeliest(7, 0.1)] * best

    oracle = Oracle(layer, said)
    right = checked = 0
    for token in ids[:50]:
        found, after = oracle.guess(0, token, 0, 3), token
        assert len(found) == 3
        for each in found:
            assert each == said[after]
            after = each.place
        hits = [each.place == want for each, want in zip(found, ids[ids.index(token) + 1 :], strict=False)]
        hits = hits[: hits.index(False) + 1] if False in hits else hits
        right, checked = right + sum(hits), checked + len(hits)
    assert asked == [(token, 3) for token in ids[:50]], "the layer is asked all the same"
    assert oracle.right_and_checked(WALK) == (right, checked)
    assert 0 < right < checked
    one_by_one = Oracle(None, said)
    for token in ids[:50]:
        for number in range(3):
            (each,) = one_by_one.guess(0, token, number, 1)
            token = each.place
    assert one_by_one.right_and_checked(WALK) == (right, checked)
    assert Oracle(lambda *_: None, said).guess(0, ids[0], 0, 1) is None
    assert len(Oracle(None, said).guess(0, ids[0], 0, 2)) == 2


class Stretch:
    """Answers of four tokens; those with drafts take less time each round, and the first one more."""

    layer, walk, record_bytes = None, WALK, 1

    def __init__(self):
        self.asked = []

    def answer(self, most, share, beliefs, seed=0, *, asks=True, graded=False):
        self.asked.append((most, share, seed, graded))
        each_ns = 100 if not most else 60 if seed else 120
        counted = SimpleNamespace(
            decode_windows=3 if not most else 2, expert_hits=3, expert_misses=1, expert_hit_bytes=3,
            expert_miss_bytes=1, expert_cpu_bytes=0,
        )  # fmt: skip
        answered = SimpleNamespace(
            ids=[1, 2, 3, 4], steps_ns=[each_ns] * 3, tokens_per_s=1e9 / each_ns, decode=counted, experts=counted
        )
        return answered, beliefs, SimpleNamespace(right_and_checked=lambda walk: (seed, 4))


def test_gains_are_of_all_rounds_and_of_those_after_the_first():
    tally, stretch = Tally(0.75), Stretch()
    for seed in range(3):
        tally.round(stretch, seed)
        assert tally.figures()["gain_after_first"] == (None if seed == 0 else 1.667)
    told = tally.figures()
    assert (told["gain"], told["gains"]) == (round(300 / 240, 3), [0.833, 1.667, 1.667])
    assert (told["tokens_per_pass"], told["right_of_checked"], told["hit_rate"]) == (1.5, 0.25, 0.75)
    assert tally.beliefs == Beliefs()


def test_the_first_share_has_all_its_rounds_before_others_begin():
    stretch = Stretch()
    told = measured(stretch, [0.75, 0.5], 3, lambda *_: None, lambda: 1e9)
    with_drafts = [each for each in stretch.asked[4:] if each[0]]
    assert with_drafts[:3] == [(3, 0.75, seed, False) for seed in range(3)]
    assert with_drafts[3:7] == [(3, 0.75, 0, True), (3, 0.5, 0, False), (1, 0.75, 0, False), (2, 0.75, 0, False)]
    assert len(with_drafts) == 15
    assert list(told["by_injected_acceptance"]) == ["75%", "75% on average, graded", "50%"]
    assert told["ms_per_token_without_drafts"] == pytest.approx(1e-4, abs=1e-3)


def test_what_there_is_no_time_for_is_left_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drafted.time, "monotonic", lambda: now[0])
    stretch = Stretch()
    answer = stretch.answer

    def timed(*args, **rest):
        now[0] += 1.0
        return answer(*args, **rest)

    stretch.answer = timed
    told = measured(stretch, [0.75], 3, lambda *_: None, lambda: 9.0 - now[0])  # four of windows, two a round
    assert [len(told["by_rows"]), list(told["by_injected_acceptance"])] == [4, ["75%"]]
    assert len(told["by_injected_acceptance"]["75%"]["gains"]) == 2
    assert told["by_most_drafts"] == {}
    short = measured(stretch, [0.75], 3, lambda *_: None, lambda: -1.0)
    assert (short["by_rows"], short["by_injected_acceptance"], short["ms_per_token_without_drafts"]) == ([], {}, None)
