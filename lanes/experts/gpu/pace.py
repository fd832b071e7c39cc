"""What the link and the grouped products of a prompt deliver on this GPU, measured before anything else is loaded.

    link       records far apart, copied from the region into slots, as a prompt's are
    products   one layer's experts for a long window, all records at hand

Takes a few slots, rows and scratch of one layer for as long as it runs. Not here: what a lane makes of the rates
(lanes.chunk, lanes.reading).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.experts.slots import Slots
from lanes.kernels import experts, grouped, places
from lanes.kernels.rows import QuantisedRows
from shared_experts.manifest import ExpertsInfo

SLOTS = 64
ROUNDS = 4  # of copies; the first one warms up
ROWS = 4096


@dataclass(frozen=True, slots=True)
class LayerPace:
    """Of copies, and of one layer's experts for each row of a long window."""

    link_bytes_per_s: float
    expert_row_s: float


def measure(
    slots: Slots, records: npt.NDArray[np.uint64], info: ExpertsInfo, chosen: int, device: torch.device,
    rows: int = ROWS,
) -> LayerPace:  # fmt: skip
    """`slots` has room for SLOTS records; `records` are addresses of the region's, as the device sees them."""
    return LayerPace(_link(slots, records, info.record_bytes, device), _products(slots, info, chosen, device, rows))


def _link(slots: Slots, records: npt.NDArray[np.uint64], record_bytes: int, device: torch.device) -> float:
    """Bytes per second."""
    took_ns = 0
    for number in range(ROUNDS):
        some = records[np.arange(SLOTS) * (len(records) // SLOTS + 1) % len(records)]
        arrival = slots.copy(list(enumerate(np.roll(some, number).tolist())))
        arrival.join()
        _finish(device)
        took_ns += arrival.took().copying_ns if number else 0
    return SLOTS * (ROUNDS - 1) * record_bytes / max(1, took_ns) * 1e9


def _products(slots: Slots, info: ExpertsInfo, chosen: int, device: torch.device, rows: int) -> float:
    """Seconds of a row."""
    layout = info.layout
    group = layout.format.group
    generator = np.random.default_rng(5)
    drawn = np.sort(np.argpartition(generator.random((rows, info.experts)), chosen - 1, axis=1)[:, :chosen], axis=1)
    ids = torch.from_numpy(drawn).to(device)
    x, weights = torch.ones(rows, layout.hidden, device=device), torch.ones(rows, chosen, device=device)
    out = torch.zeros_like(x)
    table = np.array([slots.address(expert % SLOTS) for expert in range(info.experts)], np.int64)
    addresses = torch.from_numpy(table).to(device)

    given = QuantisedRows.room(rows, layout.hidden, group, device)
    took_s = 0.0
    for _ in range(2):  # compiled by the first
        _finish(device)
        began_s = time.perf_counter()
        experts.quantise_rows(x, given, group)
        groups = grouped.ask(ids, info.experts).groups()
        room = min(max(limits.PROMPT_PLACES, int(np.diff(groups.offsets).max())), ids.numel())
        scratch = grouped.Scratch.of(layout, room, info.experts, device)
        for work in places.batches(groups, 0, info.experts, room):
            grouped.run(layout, addresses, groups, work, given, weights, scratch, out)
        _finish(device)
        took_s = time.perf_counter() - began_s
    return took_s / rows


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
