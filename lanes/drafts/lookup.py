"""Drafts copied from what was read before: where the last tokens have come already, what followed may follow again.

Cheap where an answer repeats its prompt (edits of a file, quotations). Only matches of at least LEAST tokens count, the
latest one first; each further matching token makes it surer, up to MOST.
Not here: whether copying pays (policy). Pure but for its own index: an entry a token, by a hash of the last LEAST.

Invariant: a proposal's ids stand in the sequence right after an earlier place of its last LEAST tokens; hashes only say
where to look, tokens are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lanes.drafts.proposal import NOTHING, Proposal

LEAST = 8  # tokens that match
MOST = 32
_MASK = (1 << 64) - 1
_POWERS = [pow(0x9E3779B97F4A7C15, LEAST - 1 - place, 1 << 64) for place in range(LEAST)]


class Lookup:
    """The index of one sequence: made of what there is (a million tokens a second), then `add` each further one."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._after: dict[int, int] = {}  # hash of LEAST tokens to the place after their latest occurrence
        self._match = 0  # the place after the earlier occurrence of the tokens now at the end, 0 for none
        if len(self._ids) > LEAST:
            windows = np.lib.stride_tricks.sliding_window_view(np.array(self._ids[:-1], np.uint64), LEAST)
            keys = (windows * np.array(_POWERS, np.uint64)).sum(1, dtype=np.uint64)  # modulo 2^64
            self._after = dict(zip(keys.tolist(), range(LEAST, len(self._ids)), strict=True))
        self._look()

    def add(self, token: int) -> None:
        """The sequence has one more token."""
        self._ids.append(token)
        self._look()

    def propose(self, most: int) -> Proposal:
        """Up to `most` ids that followed the same tokens before."""
        ids = tuple(self._ids[self._match : self._match + most]) if self._match else ()
        if not ids:
            return NOTHING
        sure = self._length() / MOST
        return Proposal("lookup", ids, (sure,) * len(ids))

    def _look(self) -> None:
        """Finds the earlier place of the last tokens, and remembers this one."""
        tail = self._ids[-LEAST:]
        if len(tail) < LEAST:
            return
        key = sum(token * power for token, power in zip(tail, _POWERS, strict=True)) & _MASK
        found = self._after.get(key, 0)
        self._match = found if self._ids[max(0, found - LEAST) : found] == tail else 0
        self._after[key] = len(self._ids)

    def _length(self) -> int:
        """How many tokens before both places are equal, LEAST to MOST."""
        ids, at, length = self._ids, self._match, LEAST
        while length < min(MOST, at) and ids[at - 1 - length] == ids[-1 - length]:
            length += 1
        return length
