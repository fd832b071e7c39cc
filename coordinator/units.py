"""Bytes and rates as people read them. Not here: parsing sizes (config). Invariant: four digits at most say enough."""

from __future__ import annotations


def size(n: int) -> str:
    """Bytes in the largest unit that leaves at least one of it: `1.5 GiB`, `-590.8 MiB`, `12 B`."""
    value, sign = float(abs(n)), "-" if n < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{sign}{value:.4g} {unit}"
        value /= 1024
    return f"{sign}{value:.4g} GiB"


def rate(value: float) -> str:
    """Tokens a second in three digits, never with an exponent: `0.123`, `88.2`, `1680`."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:g}"
