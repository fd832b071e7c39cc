"""How much an answer of /v1/responses may have where its client does not say."""

import pytest

from coordinator import limits
from coordinator.apis.openai.responses import parse_responses


@pytest.mark.parametrize(
    ("said", "taken"),
    [({}, limits.DEFAULT_MAX_TOKENS_RESPONSES), ({"max_output_tokens": None}, limits.DEFAULT_MAX_TOKENS_RESPONSES),
     ({"max_output_tokens": 0}, 0), ({"max_output_tokens": 7}, 7)],
)  # fmt: skip
def test_the_limit_that_a_client_names_or_not(said, taken):
    body, ask = parse_responses({"input": "Hello", **said})
    assert ask.max_tokens == taken
    assert body.max_output_tokens == said.get("max_output_tokens"), "the answer repeats what was asked"
