"""Which sessions belong together: an agent, the agents it started, and theirs. Pure.

Invariant: a session's family is the session that stands at its top, as far as anybody has said; never more than `bound`
sessions are remembered, the least recently used one is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict


class Families:
    """Session -> the session at its top, per tenant."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._tops: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tops)

    def of(self, tenant: str, session: str | None, parent: str | None) -> str:
        """The family of a request; empty for one that names no session."""
        if session is None:
            return "" if parent is None else self._tops.get((tenant, parent), parent)
        key = (tenant, session)
        if parent is not None and parent != session:
            top = self._tops.get((tenant, parent), parent)
            if top != session:  # two that name each other as parents are two families
                self._tops[key] = top
        if key not in self._tops:
            return session
        self._tops.move_to_end(key)
        if len(self._tops) > self._bound:
            self._tops.popitem(last=False)
        return self._tops[key]
