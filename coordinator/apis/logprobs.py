"""Which tokens go out with which text.

Not here: how they are written (each API). Invariant: a token comes no later than the text after it, and one of a stop
string, whose text never comes, not at all.
"""

from __future__ import annotations

from coordinator.answer import AnswerToken, Final, Piece


class LogprobFeed:
    """Releases tokens together with their text, so that those of a stop string, whose text never comes, are dropped."""

    def __init__(self) -> None:
        self._held: list[AnswerToken] = []
        self._shown = 0  # characters

    def feed(self, piece: Piece) -> list[AnswerToken]:
        """The tokens whose text begins in what has been shown."""
        self._held += (known for known in piece.tokens if not known.is_stop)
        self._shown += len(piece.text)
        count = next((n for n, known in enumerate(self._held) if known.start >= self._shown), len(self._held))
        released, self._held = self._held[:count], self._held[count:]
        return released

    def flush(self, final: Final) -> list[AnswerToken]:
        """What is left at the end: tokens without text, or of a stop string."""
        released, self._held = self._held, []
        return [] if final.stopped_by_text else released
