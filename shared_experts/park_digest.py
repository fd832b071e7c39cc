"""What a part of a parked conversation is called: a digest of its bytes, of which threads may take pieces.

    up to a piece    xxh3-128 of the bytes
    larger           xxh3-128 of the digests of its pieces, in order: 118 MB by one thread are a chain of 12 to 27 ms

Not here: whose parts, where they are (park_index), who takes digests (lanes). Whoever changes what a part is called
changes the versions of park_messages, park_disk and the lanes' snapshots: nothing that was parked before is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from shared_experts.park_memory import Bytes

PIECE_BYTES = 8 << 20


def of_bytes(data: Bytes) -> bytes:
    """Of a part, uint8."""
    size = data.shape[0]
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, max(1, size), PIECE_BYTES)]
    return of_pieces([xxhash.xxh3_128_digest(piece.data) for piece in pieces])


def of_pieces(digests: Sequence[bytes]) -> bytes:
    """Of a part, by the xxh3-128 of each of its pieces, of `PIECE_BYTES` but the last; an empty one has one."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def cut(runs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Where each piece of a part is whose bytes are these (offset, bytes) in order."""
    pieces: list[list[tuple[int, int]]] = [[]]
    left = PIECE_BYTES
    for offset, size in runs:
        while size:
            if not left:
                pieces.append([])
                left = PIECE_BYTES
            part = min(size, left)
            pieces[-1].append((offset, part))
            offset, size, left = offset + part, size - part, left - part
    return pieces
