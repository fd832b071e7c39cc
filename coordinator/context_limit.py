"""The refusal of a prompt that leaves no room for an answer, in the words that agents look for before they shorten it.

Not here: who finds that out (request, text). Invariant: the phrases of both APIs' own servers are in it.
"""

from __future__ import annotations

from coordinator.errors import ContextLengthExceeded


def too_long(found: str, *, context_tokens: int, param: str) -> ContextLengthExceeded:
    """`found`: how long the prompt is, with its unit."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context_tokens} tokens, and the answer must fit into it too. "
        f"However, the prompt has {found}. Please reduce its length.",
        param=param,
    )
