"""The chain of a prompt: one value per whole block of 64 tokens that stands for every token up to its end.

    chain[0] = H(16 zero bytes, tokens 0..63)        H = BLAKE2b of 16 bytes, keyed with the tenant's salt
    chain[i] = H(chain[i - 1], tokens 64 i .. 64 i + 63)            tokens as 32-bit little endian words

Both ends of lane.proto compute it. Not here: who compares tokens (the lane: equal chains are a reason to look, no
proof). Invariant: two tenants with different salts share no value; the last, open block is in no value.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence

BLOCK_TOKENS = 64
CHAIN_BYTES = 16
SALT_BYTES_MAX = 64

EMPTY = bytes(CHAIN_BYTES)  # of a prompt without a whole block


def chain(token_ids: Sequence[int], salt: bytes, *, after: bytes = EMPTY) -> list[bytes]:
    """The values of all whole blocks; `after` is the value of what comes before `token_ids`."""
    words = array.array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words).cast("B")
    values: list[bytes] = []
    for start in range(0, len(words) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        block = hashlib.blake2b(after, digest_size=CHAIN_BYTES, key=salt)
        block.update(data[4 * start : 4 * (start + BLOCK_TOKENS)])
        after = block.digest()
        values.append(after)
    return values
