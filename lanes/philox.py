"""Philox4x32-10 (Salmon et al., 2011): random words as a pure function of (key, counter).

Not a stream: no state, nothing to save or roll back. A draw is `uniform(seed, position)`, so a replay on another lane,
or another window size, draws the same number for the same token.
"""

from __future__ import annotations

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over a 128-bit counter under a 64-bit key; words are unsigned 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits that depends on (seed, absolute position) only."""
    counter = (position & _MASK, position >> 32 & _MASK, 0, 0)
    low, high, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
