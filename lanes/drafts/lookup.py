"""Drafts copied from what was read before: where the last tokens have come already, what followed may follow again.

Cheap where an answer repeats its prompt (edits of a file, quotations). Only matches of at least LEAST tokens count, the
latest one first; each further matching token makes it surer, up to MOST.
Not here: whether copying pays (policy). Pure but for its own index, which grows by one entry a token.

Invariant: a proposal's ids stand in the sequence right after an earlier place of its last LEAST tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.drafts.proposal import NOTHING, Proposal

LEAST = 8  # tokens that match
MOST = 32


class Lookup:
    """The index of one sequence; `add` every token of it, in order."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the last LEAST tokens to the place after their latest occurrence
        self._match = 0  # the place after the earlier occurrence of the tokens now at the end, 0 for none
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """The sequence has one more token."""
        self._ids.append(token)
        if len(self._ids) < LEAST:
            return
        key = tuple(self._ids[-LEAST:])
        self._match = self._after.get(key, 0)
        self._after[key] = len(self._ids)

    def propose(self, most: int) -> Proposal:
        """Up to `most` ids that followed the same tokens before."""
        ids = tuple(self._ids[self._match : self._match + most]) if self._match else ()
        if not ids:
            return NOTHING
        sure = self._length() / MOST
        return Proposal("lookup", ids, (sure,) * len(ids))

    def _length(self) -> int:
        """How many tokens before both places are equal, LEAST to MOST."""
        ids, at, length = self._ids, self._match, LEAST
        while length < min(MOST, at) and ids[at - 1 - length] == ids[-1 - length]:
            length += 1
        return length
