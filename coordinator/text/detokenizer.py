"""Token ids to text, as they come: only complete characters.

Not here: stop strings. Invariant: all pieces and the `flush` together are what decoding all ids at once gives (special
tokens skipped, what is not UTF-8 as U+FFFD), and no piece ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer. `token_bytes` gives the bytes of a token, none for a special or an unknown one."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _utf8(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The answer is over: an unfinished character as U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
