"""How many prompt rows make a window: from the memory that is free for it, or as asked. Pure.

Every chunk reads nearly every expert once, so where experts come over a link a longer chunk is a cheaper prompt; its
activations take room from the expert cache, and whoever waits for a chunk's end waits longer. The choice depends on
the model and the budget alone: equal lanes cut prompts alike, so their answers are equal to the bit.

Not here: what a row's activations take (the device's start).
"""

from __future__ import annotations

from dataclasses import dataclass

from lanes import limits

SHARE = 4  # activations take at most one part in so many of what is free for them and the expert cache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a window of a prompt, and why so many, in words for the log."""

    rows: int
    reason: str


def of_host(asked: int | None) -> Chunk:
    """A CPU lane reads every record from the same memory whatever it holds: a short chunk costs it little."""
    if asked is not None:
        return Chunk(asked, "asked for")
    return Chunk(limits.DEFAULT_PREFILL_CHUNK_ROWS, "a CPU lane's default: longer ones only make others wait")


def of_device(asked: int | None, free_bytes: int, row_bytes: int) -> Chunk:
    """The largest power of two whose rows fit, from the CPU lanes' default to the most that may be asked for."""
    if asked is not None:
        return Chunk(asked, "asked for")
    rows, least = limits.MAX_PREFILL_CHUNK_ROWS, limits.DEFAULT_PREFILL_CHUNK_ROWS
    while rows > least and rows * row_bytes > free_bytes // SHARE:
        rows //= 2
    mib = 1 << 20
    fits = "take" if rows * row_bytes <= free_bytes // SHARE else "are the least, and take"
    return Chunk(
        rows,
        f"{rows} rows {fits} {rows * row_bytes // mib} MiB; a part in {SHARE} of {max(0, free_bytes) // mib} MiB may",
    )
