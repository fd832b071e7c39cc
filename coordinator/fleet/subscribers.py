"""Those who want to hear that something has changed.

Not here: what changed. Invariants: a subscription is its own, even of a function that is subscribed twice; whoever
unsubscribes while all are told may still hear of that change, and of none after it.
"""

from __future__ import annotations

from collections.abc import Callable


class Subscribers:
    """Plain functions, told in the order in which they came."""

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[], None]] = {}

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """From now on; the returned function ends it, and may be called again."""
        key = object()
        self._callbacks[key] = callback

        def unsubscribe() -> None:
            self._callbacks.pop(key, None)

        return unsubscribe

    def tell(self) -> None:
        """All of them, once."""
        for callback in tuple(self._callbacks.values()):
            callback()
