"""The chain of a prompt: what both ends of the wire compute."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneproto.chain import BLOCK_TOKENS, CHAIN_BYTES, EMPTY, SALT_BYTES_MAX, chain

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def test_the_value_is_the_one_that_is_written_down():
    block = hashlib.blake2b(digest_size=16, key=b"salt")
    block.update(bytes(16) + b"".join(i.to_bytes(4, "little") for i in range(64)))
    assert chain(range(64), b"salt") == [block.digest()]


@given(IDS, st.integers(0, 300))
def test_a_value_stands_for_everything_before_it(ids, cut):
    whole = chain(ids, b"s")
    assert len(whole) == len(ids) // BLOCK_TOKENS
    assert all(len(value) == CHAIN_BYTES for value in whole)
    cut = min(cut, len(ids)) // BLOCK_TOKENS * BLOCK_TOKENS
    before = chain(ids[:cut], b"s")
    assert [*before, *chain(ids[cut:], b"s", after=before[-1] if before else EMPTY)] == whole
    changed = [*ids]
    for at in {0, len(ids) // 2} if ids else ():
        changed[at] ^= 1
    assert not set(whole) & set(chain(changed, b"s")[: len(whole)]) or not ids


@given(IDS)
def test_tenants_share_no_value(ids):
    assert not set(chain(ids, b"a")) & set(chain(ids, b"b"))
    assert not set(chain(ids, b"")) & set(chain(ids, b"\0" * 64))


def test_a_salt_has_at_most_64_bytes():
    assert chain(range(64), b"x" * SALT_BYTES_MAX)
    with pytest.raises(ValueError, match="key"):
        chain(range(64), b"x" * (SALT_BYTES_MAX + 1))
