"""When two sets of logits for the same tokens are margin-equal: the one definition, for every pack. Pure.

A row's distance is its greatest difference, of its greatest logit. Nine rows in ten are at most `common` apart and none
is more than `most`; a best token that leads by more than twice `common` is the same one. With f32 experts both numbers
are one. Quantised experts round their input, and a last bit that turns a rounding, or a router's choice behind it,
moves a row by far more than the bit (docs/exactness.md has the measured distribution).

Where one side rounds what the other does not (a GPU lane the inputs of its products, to bf16), a row may be as much
further apart as that rounding alone was measured to move it: a property of the pack, small in a trained one.

Not here: what is compared, or equal to the bit. Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FP32 = 2e-4  # of the row's greatest logit
BF16 = 2e-2
TURNED = 2e-1  # a rounding or a choice went the other way


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Of the greatest logit of a row."""

    common: float
    most: float

    @classmethod
    def of(cls, dense_dtype: str, expert_format: str) -> Tolerance:
        """Of a pack with such dense weights ("f32", "bf16") and experts."""
        if expert_format != "f32":
            return cls(BF16, TURNED)
        return cls(FP32, FP32) if dense_dtype == "f32" else cls(BF16, BF16)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found in T rows."""

    offs: NDArray[np.float64]  # [T]; infinite where a logit is not finite
    sure: int  # rows whose best token leads by more than is allowed to move
    other: int  # of those, rows with another best token
    moved: NDArray[np.float64] | float = 0.0  # [T] by rounding alone

    def held(self, tolerance: Tolerance) -> bool:
        """Whether they are margin-equal."""
        over = int((self.offs > tolerance.common + self.moved).sum())
        within = bool((self.offs <= tolerance.most + self.moved).all())
        return not self.other and 10 * over <= len(self.offs) and within


def compare(
    got: NDArray[np.float32], want: NDArray[np.float32], tolerance: Tolerance, moved: NDArray[np.float64] | float = 0.0
) -> Compared:
    """Logits [T, V] against the truth's; `moved` [T]: how far rounding alone moves each row."""
    scale = np.abs(want).max(axis=1)
    with np.errstate(invalid="ignore"):
        offs = np.abs(got.astype(np.float64) - want).max(axis=1) / scale
    second, first = np.partition(want, -2, axis=1)[:, -2:].T
    sure = (first - second) / scale > 2 * (tolerance.common + moved)
    other = sure & (got.argmax(axis=1) != want.argmax(axis=1))
    return Compared(np.nan_to_num(offs, nan=np.inf, posinf=np.inf), int(sure.sum()), int(other.sum()), moved)
