"""What an API makes of a turn: events of a stream, or one body. The seam between doors and APIs.

Not here: HTTP. Invariant: `begin`, `said`…, then `end` or `failed`, give one whole stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.chat import Said, Turn, TurnEnd
from coordinator.errors import CoordinatorError


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; a text is sent as it is."""

    data: dict[str, Any] | str
    name: str | None = None


def dump(value: dict[str, Any]) -> str:
    """JSON that no reader can misread: no NaN, no line breaks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Writer(Protocol):
    """One answer's wire format."""

    def begin(self) -> Iterable[Event]:
        """A lane has begun."""
        ...

    def said(self, said: Said) -> Iterable[Event]:
        """Some more of the turn."""
        ...

    def end(self, end: TurnEnd) -> Iterable[Event]:
        """The end."""
        ...

    def failed(self, error: CoordinatorError) -> Iterable[Event]:
        """The end of a stream that had begun."""
        ...

    def ping(self) -> Event | None:
        """Sent while there is nothing to say; None: a comment will do."""
        ...

    def whole(self, turn: Turn, end: TurnEnd) -> dict[str, Any]:
        """The answer in one body."""
        ...
