"""Windows of each size are seen by a lane that believes in its drafts, whatever they cost: `bench.drafted.certain`."""

import pytest

from bench.drafted import certain
from lanes.drafts import policy
from lanes.drafts.chain import Guessed
from lanes.drafts.policy import Round
from lanes.drafts.proposal import Proposal


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_all_but_single_rows_now_and_then_are_windows_of_the_asked_size(drafts):
    beliefs, rows = certain(), []
    for _ in range(400):
        asked = policy.guesses_at_once(beliefs, policy.may_try(beliefs, "layer", drafts, at_once=True))
        proposal = Proposal("layer", tuple(range(asked)), (1.0,) * asked, asked=asked > 0)
        guessed = Guessed(asked, at_once=True, sure=(1.0,) * asked)
        window_ns = 5_000_000 * (1 + asked)  # which no draft is worth
        beliefs = policy.learn(beliefs, Round(proposal, guessed, 50_000 * asked, window_ns, asked, asked))
        rows.append(1 + asked)
    assert set(rows) == {1, 1 + drafts}
    assert rows.count(1) <= 400 / policy.SINGLE_EVERY + 1
