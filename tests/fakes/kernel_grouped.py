"""Cases of the grouped expert kernel, run by the interpreter's tests and by those on a GPU: every bit of the twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lanes.kernels import experts, grouped, naive, places
from lanes.kernels.rows import QuantisedRows
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from tests.fakes import expert_records as made
from tests.fakes.kernel_experts import RATHER_NOT_A_NUMBER


def computed(
    device: str, layout: RecordLayout, records: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    cuts: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """out [R, H] of rows whose experts come in batches that end at `cuts`."""
    records, x, weights = records.to(device), x.to(device), weights.to(device)
    count = len(records)
    table = records.data_ptr() + torch.arange(count, dtype=torch.int64, device=device) * layout.record_bytes
    quantised = QuantisedRows.room(len(x), layout.hidden, layout.format.group, device)
    groups = grouped.ask(ids.to(device), count).groups()
    out = torch.zeros((len(x), layout.hidden), device=device)
    with np.errstate(all="ignore"):
        experts.quantise_rows(x, quantised, layout.format.group)
        for first, end in zip([0, *cuts], [*cuts, count], strict=True):
            work = places.batch(groups, first, end)
            room = grouped.Scratch.of(layout, work.places, end - first, device)
            for tensor in (room.x_scale, room.scale, room.y):
                tensor.fill_(RATHER_NOT_A_NUMBER)
            grouped.run(layout, table, groups, work, quantised, weights, room, out)
    return out.cpu()


def check_grouped(
    device: str, format: str, hidden: int, inner: int, rows: int, chosen: int, count: int, *, cuts: Sequence[int] = (),
    seed: int = 0, hostile: bool = False,
) -> None:  # fmt: skip
    """Against the twins, one pair after another."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout.of(EXPERT_FORMATS[format], hidden, inner)
    records = torch.zeros((count, layout.record_bytes), dtype=torch.uint8)
    for record in records.numpy():
        made.fill(record, layout, rng, hostile=hostile)
    x = torch.from_numpy(made.activations(rows, hidden, rng, hostile=hostile))
    ids = torch.from_numpy(np.stack([np.sort(rng.permutation(count)[:chosen]) for _ in range(rows)]).astype(np.int32))
    weights = torch.from_numpy(rng.random((rows, chosen)).astype(np.float32))
    y = torch.full((rows * chosen, hidden), RATHER_NOT_A_NUMBER)
    host = records.data_ptr() + torch.arange(count, dtype=torch.int64) * layout.record_bytes
    pairs = torch.full((count, rows), -1, dtype=torch.int32)
    for pair, id in enumerate(ids.reshape(-1).tolist()):
        pairs[id, pair // chosen] = pair
    want = torch.empty((rows, hidden))
    with np.errstate(all="ignore"):
        naive.experts(layout, host, torch.arange(count, dtype=torch.int32), pairs, x, y)
        naive.combine(weights, y, want)
    got = computed(device, layout, records, x, ids, weights, cuts)
    same = made.bits(got.numpy()) == made.bits(want.numpy())
    assert same.all(), f"{(~same).sum()} of {same.size} elements differ"


def check_chunks(device: str, layout: RecordLayout, rows: int, chosen: int, count: int, seed: int = 0) -> None:
    """A chunk's rows one by one, in two parts and at once; experts at once and one by one: the same bits."""
    rng = np.random.default_rng(seed)
    records = torch.zeros((count, layout.record_bytes), dtype=torch.uint8)
    for record in records.numpy():
        made.fill(record, layout, rng)
    x = torch.from_numpy(made.activations(rows, layout.hidden, rng))
    ids = torch.from_numpy(np.stack([np.sort(rng.permutation(count)[:chosen]) for _ in range(rows)]).astype(np.int32))
    weights = torch.from_numpy(rng.random((rows, chosen)).astype(np.float32))

    def of(rows: slice, cuts: Sequence[int] = ()) -> torch.Tensor:
        return computed(device, layout, records, x[rows], ids[rows], weights[rows], cuts)

    whole = of(slice(None))
    assert torch.equal(whole, torch.cat([of(slice(0, rows // 3)), of(slice(rows // 3, None))]))
    assert torch.equal(whole, of(slice(None), range(1, count)))
    assert torch.equal(whole[-1:], of(slice(rows - 1, None)))
