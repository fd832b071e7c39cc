"""Which answers need of a row of logits nothing but its greatest id, and that both ways to draw are one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lanes.answer import Answer
from lanes.request import Request, Sampling
from lanes.sampler import greedy

VOCABULARY = 40
PLAIN = Request("r", (1, 2, 3), 20, stop_ids=frozenset({7}))
ROWS = arrays.arrays(
    np.float32, (6, VOCABULARY), elements=st.sampled_from([-3.0, -0.0, 0.0, 1.5, 2.0, float(np.finfo(np.float32).max)])
)


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": Sampling(temperature=0.5)},
        {"sampling": Sampling(repetition_penalty=1.1)},
        {"sampling": Sampling(presence_penalty=-0.5)},
        {"sampling": Sampling(frequency_penalty=0.5)},
        {"sampling": Sampling(logit_bias=((3, 1.0),))},
        {"sampling": Sampling(min_tokens=1)},
        {"logprobs": True},
    ],
)
def test_what_needs_the_whole_row(other):
    assert Answer(PLAIN, VOCABULARY).greedy
    assert not Answer(replace(PLAIN, **other), VOCABULARY).greedy


def test_what_changes_nothing_needs_no_row():
    for sampling in (Sampling(top_k=3, top_p=0.5, min_p=0.1, seed=9), Sampling(min_tokens=4)):
        assert Answer(Request("r", (1, 2), 5, sampling), VOCABULARY).greedy, "without stop ids none is held back"


def test_a_grammar_needs_the_whole_row():
    class Anything:
        def add(self, token: int) -> None: ...

    assert not Answer(PLAIN, VOCABULARY, Anything()).greedy  # type: ignore[arg-type]


def test_once_stop_ids_may_come_no_row_is_needed():
    answer = Answer(replace(PLAIN, sampling=Sampling(min_tokens=2)), VOCABULARY)
    row = np.zeros(VOCABULARY, np.float32)
    row[7] = 1.0
    assert [answer.draw(row).id, answer.greedy, answer.draw(row).id, answer.greedy] == [0, False, 0, True]


@settings(max_examples=60)
@given(ROWS)
def test_ids_give_the_answer_that_rows_give(rows):
    by_rows, by_ids = (Answer(PLAIN, VOCABULARY) for _ in range(2))
    for row, id in zip(rows, greedy(rows), strict=True):
        assert by_rows.draw(row).id == by_ids.take(int(id)).id
    assert (by_rows.position, by_rows.last, by_rows.left) == (by_ids.position, by_ids.last, by_ids.left)
