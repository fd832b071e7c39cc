"""A repeated key at the end of a large header is refused at once: it took a minute for 27 MB, by counting each key."""

import time

import pytest

from shared_experts.fields import unique


def test_a_late_repeated_key_costs_no_more_than_the_keys():
    pairs = [(f"key {number}", number) for number in range(200_000)]
    began = time.process_time()
    with pytest.raises(ValueError, match="key 'key 199999' is given twice"):
        unique([*pairs, pairs[-1]])
    assert time.process_time() - began < 5
    assert unique(pairs) == dict(pairs)
