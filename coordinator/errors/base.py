"""The base of every error of the coordinator. The tree is drawn in the package. Invariant: imports nothing of ours."""

from typing import ClassVar


class CoordinatorError(Exception):
    """Base of every error this package raises on purpose."""

    code: ClassVar[str] = "coordinator"
    retryable: ClassVar[bool] = False
    http: ClassVar[int] = 500
    grpc: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.retry_after_s = retry_after_s  # when there may be room; None: nobody knows


def codes_of(*kinds: type[CoordinatorError]) -> frozenset[str]:
    """Of these kinds of errors and all kinds of them."""
    below = [code for kind in kinds for child in kind.__subclasses__() for code in codes_of(child)]
    return frozenset((*(kind.code for kind in kinds), *below))
