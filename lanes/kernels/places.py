"""Who goes where in a long window's experts: pairs sorted by (expert, row), cut into tiles of one expert each.

    ask(ids) ─▶ sort ─▶ begin of every expert ─▶ tiles      on the device; the begins also come to the host, by a kernel
    groups() waits for those alone; batches(...) are then ranges of tiles and places

While a prompt streams, nothing here (or in what its experts launch) is copied by the copy engine: a copy of 4 KiB on
the computing stream waits for whatever records are on their way, 0.5 to 1.4 ms each on an H200. Small numbers cross
through pinned memory that kernels read (lanes.kernels.fetch) and write where it lies.

Not here: what is computed (grouped). Invariant: a place is a pair's position in ascending (expert, row); tiles are in
that order, and each lies in one expert.

Letters: R rows, K experts per row, P = R * K pairs, E experts, T tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

WRITTEN = 64  # tiles of an expert that one step of a program writes


@dataclass(frozen=True, slots=True)
class Groups:
    """Who goes where: pair int32 [P], the pair of each place; place int32 [P], the inverse; tiles int32 [T, 3] (expert,
    first place, places), of `tile_rows` at most; on the host the first place of every expert [E + 1], and first tile.
    """

    pair: torch.Tensor
    place: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    offsets: npt.NDArray[np.int64]
    first_tile: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Experts first..end-1: their tiles, and the places that they take."""

    first_tile: int
    end_tile: int
    first_place: int
    end_place: int

    @property
    def places(self) -> int:
        """Rows of scratch that it needs."""
        return self.end_place - self.first_place


@dataclass(frozen=True, slots=True)
class Asked:
    """Groups whose sizes are on their way to the host."""

    pair: torch.Tensor
    place: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int
    begins: torch.Tensor  # int32 [E + 1], pinned
    written: torch.cuda.Event | None

    def groups(self) -> Groups:
        """Waits until the sizes are there, and for nothing that was enqueued since."""
        if self.written is not None:
            self.written.synchronize()
        offsets = self.begins.numpy().astype(np.int64)
        tiles = -(-np.diff(offsets) // self.tile_rows)
        first_tile = np.concatenate(([0], tiles.cumsum()))
        return Groups(self.pair, self.place, self.tiles, self.tile_rows, offsets, first_tile)


def host_words(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory of the host that kernels on the device read and write."""
    return torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")


def ask(ids: torch.Tensor, experts: int, tile_rows: int, begins: torch.Tensor | None = None) -> Asked:
    """Enqueues the sorting of pairs of ids int [R, K]. `begins` (`host_words` [E + 1], int32) is overwritten."""
    flat = ids.reshape(-1).to(torch.int32)
    pairs, device = len(flat), ids.device
    begins = host_words(experts + 1, device, torch.int32) if begins is None else begins
    found = torch.sort(flat, stable=True)
    place = torch.empty_like(flat)
    place.scatter_(0, found.indices, torch.arange(pairs, dtype=torch.int32, device=device))
    edges = torch.arange(experts + 1, dtype=torch.int32, device=device)
    first = torch.searchsorted(found.values, edges, out_int32=True)
    tiles = torch.empty((pairs // tile_rows + min(experts, pairs), 3), dtype=torch.int32, device=device)
    _tiles[(experts,)](
        first, begins, tiles, E=experts, EP=triton.next_power_of_2(experts), ROWS=tile_rows, STEP=WRITTEN, num_warps=4
    )  # fmt: skip
    written = None
    if device.type == "cuda":
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(device))
    return Asked(found.indices.to(torch.int32), place, tiles, tile_rows, begins, written)


def batch(groups: Groups, first: int, end: int) -> Batch:
    """The work of experts first..end-1."""
    tiles, places = groups.first_tile, groups.offsets
    return Batch(int(tiles[first]), int(tiles[end]), int(places[first]), int(places[end]))


def batches(groups: Groups, first: int, end: int, most_places: int) -> Iterator[Batch]:
    """Experts first..end-1 in batches of at most that many places, or of one expert; none without any."""
    while first < end:
        stop = int(np.searchsorted(groups.offsets, groups.offsets[first] + most_places, side="right")) - 1
        stop = min(max(stop, first + 1), end)
        if groups.offsets[stop] > groups.offsets[first]:
            yield batch(groups, first, stop)
        first = stop


@triton.jit
def _tiles(first, begins, tiles, E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    expert = tl.program_id(0)
    e = tl.arange(0, EP)
    begin = tl.load(first + e, mask=e < E, other=0)
    end = tl.load(first + e + 1, mask=e < E, other=0)
    counts = (end - begin + ROWS - 1) // ROWS
    before = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    place, stop = tl.load(first + expert), tl.load(first + expert + 1)
    tl.store(begins + expert, place)
    if expert == E - 1:
        tl.store(begins + E, stop)
    count = (stop - place + ROWS - 1) // ROWS
    for t in range(0, count, STEP):
        n = t + tl.arange(0, STEP)
        at, start = tiles + (before + n) * 3, place + n * ROWS
        tl.store(at, tl.zeros((STEP,), tl.int32) + expert, mask=n < count)
        tl.store(at + 1, start, mask=n < count)
        tl.store(at + 2, tl.minimum(stop - start, ROWS), mask=n < count)
