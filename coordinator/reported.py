"""What another process reported, as an error of ours.

Not here: our own errors (errors). Invariant: the code is the one that was reported.
"""

from __future__ import annotations

from coordinator.errors import CoordinatorError


def reported(code: str, message: str) -> CoordinatorError:
    """An error of its own stable code (codes belong to classes)."""
    return type("Reported", (CoordinatorError,), {"code": code})(message)  # type: ignore[no-any-return]
