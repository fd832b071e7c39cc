"""How many prompt rows make a window: what the link needs and what memory holds, or as asked. Pure.

Every chunk reads nearly every expert once, so where experts come over a link a chunk wants to be so long that computing
it covers the copies; what is longer only takes room from the expert cache, and whoever waits for a chunk's end waits
longer. Only powers of two are chosen: lanes of one kind then cut prompts alike, and answer alike to the bit, unless
what they measured falls on either side of one.

Not here: what a row's activations take and how rates are measured (the device's start).
"""

from __future__ import annotations

from dataclasses import dataclass

from lanes import limits

SHARE = 2  # activations take at most one part in so many of what is free for them and the expert cache
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a window of a prompt, and why so many, in words for the log."""

    rows: int
    reason: str


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer's experts take: the link for those that are not cached, the GPU for each row's products."""

    stream_s: float
    row_s: float


def of_host(asked: int | None) -> Chunk:
    """A CPU lane reads every record from the same memory whatever it holds: a short chunk costs it little."""
    if asked is not None:
        return Chunk(asked, "asked for")
    return Chunk(limits.DEFAULT_PREFILL_CHUNK_ROWS, "a CPU lane's default: longer ones only make others wait")


def of_device(asked: int | None, free_bytes: int, row_bytes: int, layer: Layer) -> Chunk:
    """The least power of two whose products take as long as the layer's copies, as far as memory allows.

    From the CPU lanes' default to the most that may be asked for.
    """
    if asked is not None:
        return Chunk(asked, "asked for")
    fits, covers = rows_that_fit(free_bytes, row_bytes), limits.DEFAULT_PREFILL_CHUNK_ROWS
    while covers < limits.MAX_PREFILL_CHUNK_ROWS and covers * layer.row_s < layer.stream_s:
        covers *= 2
    rows = min(fits, covers)
    link = f"the link takes {layer.stream_s * 1e3:.1f} ms for a layer, {rows} rows {rows * layer.row_s * 1e3:.1f} ms"
    inside = rows * row_bytes <= free_bytes // SHARE
    memory = (
        f"they {'take' if inside else 'are the least, and take'} {rows * row_bytes // _MIB} MiB; "
        f"a part in {SHARE} of {max(0, free_bytes) // _MIB} MiB may"
    )
    return Chunk(rows, f"{link}; {memory}")


def rows_that_fit(free_bytes: int, row_bytes: int) -> int:
    """The largest power of two whose activations fit; the CPU lanes' default where nothing does."""
    rows, least = limits.MAX_PREFILL_CHUNK_ROWS, limits.DEFAULT_PREFILL_CHUNK_ROWS
    while rows > least and rows * row_bytes > free_bytes // SHARE:
        rows //= 2
    return rows
