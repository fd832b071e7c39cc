"""Cases of the route kernel, for the interpreter and for a GPU."""

from __future__ import annotations

import numpy as np
import torch

from lanes.kernels import jobs, naive, post, route
from lanes.kernels.rows import Jobs, QuantisedRows


def check_route(
    device: str, rows: int, chosen: int, experts: int, *, seed: int = 0, missing: float = 0.5, ties: bool = False,
    normalise: bool = True,
) -> None:  # fmt: skip
    """Ids, jobs and slots exactly, weights to fp32 rounding; logits lie in wider rows, as the router's do."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((rows, experts + 1)).astype(np.float32) * 3
    if ties:  # few values, both zeros among them
        wide = rng.choice(np.float32([-1.5, -0.0, 0.0, 2.0]), wide.shape)
        wide[0] = 0.0
    logits = torch.from_numpy(wide)
    resident = torch.from_numpy((rng.random(experts) >= missing).astype(np.int8))
    pairs = rows * chosen
    table = torch.from_numpy(rng.integers(0, pairs + 1, pairs + 1).astype(np.int32)).minimum(
        torch.arange(pairs + 1, dtype=torch.int32)
    )
    ids, weights, expert, job_pairs, slots = naive.route(logits, resident, table, chosen, normalise=normalise)

    def filled(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, -77, dtype=dtype, device=device)

    out = route.Routed(
        filled(rows, chosen), filled(rows, chosen, dtype=torch.float32), Jobs.room(rows, chosen, device).fill_(-77),
        filled(pairs),
    )  # fmt: skip
    route.route(logits.to(device), resident.to(device), table.to(device), out, normalise=normalise)
    assert torch.equal(out.ids.cpu().long(), ids)
    torch.testing.assert_close(out.weights.cpu(), weights, rtol=2e-6, atol=1e-9)
    assert torch.equal(out.jobs.expert.cpu(), expert)
    used = expert >= 0
    assert torch.equal(out.jobs.pairs.cpu()[used], job_pairs[used])
    assert torch.equal(out.slots.cpu(), slots)


def check_posted(device: str, rows: int, chosen: int, experts: int, hidden: int, *, seed: int = 0) -> None:
    """Routing that posts leaves what posting behind it leaves, every bit, with and without a share of the CPU's."""
    rng = np.random.default_rng(seed)
    group, pairs = 32, rows * chosen
    logits = torch.from_numpy(rng.standard_normal((rows, experts + 1)).astype(np.float32)).to(device)
    resident = torch.from_numpy((rng.random(experts) < 0.5).astype(np.int8)).to(device)
    table = torch.arange(pairs + 1, dtype=torch.int32).div(2, rounding_mode="floor").to(device)
    x = torch.from_numpy(
        (rng.standard_normal((rows, hidden)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    )
    x = x.to(device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.full(shape, -77, dtype=torch.int32, device=device)

    for shared in (False, True):
        left = []
        for at_once in (False, True):
            out = route.Routed(
                integers(rows, chosen), torch.zeros((rows, chosen), device=device),
                Jobs.room(rows, chosen, device).fill_(-77), integers(pairs),
            )  # fmt: skip
            quantised = QuantisedRows.room(rows, hidden, group, device).fill_(-77)
            inputs = post.Inputs(integers(2), integers(pairs), torch.zeros((rows, hidden), device=device))
            said = post.Post(x, quantised, group, integers(rows, chosen), 3, inputs if shared else None)
            route.route(logits, resident, table, out, normalise=True, posted=said if at_once else None)
            if not at_once:
                post.post(x, out.ids, out.slots, quantised, group, said.log, 3, said.inputs)
            tensors = (
                out.ids, out.weights, out.jobs.expert, out.slots, quantised.q, quantised.scale, quantised.correction,
                said.log, inputs.head, inputs.ids, inputs.x,
            )  # fmt: skip
            left.append([t.cpu() for t in tensors])
        for number, (behind, within) in enumerate(zip(*left, strict=True)):
            assert torch.equal(behind, within), number


def check_route_of_what_is_no_number(device: str) -> None:
    """Whatever the logits are, ids are in range, distinct and ascending: nothing reads outside a table."""
    logits = torch.full((2, 24), float("nan"))
    logits[1] = float("-inf")
    logits[1, 5:9] = float("nan")
    out = route.Routed(
        *(torch.zeros((2, 6), dtype=t, device=device) for t in (torch.int32, torch.float32)),
        Jobs.room(2, 6, device),
        torch.zeros(12, dtype=torch.int32, device=device),
    )
    zeros = torch.zeros(24, dtype=torch.int32, device=device)
    with np.errstate(all="ignore"):
        route.route(logits.to(device), zeros.to(torch.int8), zeros[:13], out, normalise=True)
    assert out.ids.cpu().tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 5, 6, 7, 8]]


def check_jobs(device: str, rows: int, chosen: int, experts: int, *, seed: int = 0, missing: float = 0.5) -> None:
    """Jobs and slots of given ids, exactly; rows share experts."""
    rng = np.random.default_rng(seed)
    popular = np.sort(rng.permutation(experts)[: min(experts, chosen + 3)])
    ids = torch.from_numpy(np.stack([np.sort(rng.permutation(popular)[:chosen]) for _ in range(rows)]).astype(np.int32))
    resident = torch.from_numpy((rng.random(experts) >= missing).astype(np.int8))
    pairs = rows * chosen
    table = torch.from_numpy(rng.integers(0, np.arange(1, pairs + 2)).astype(np.int32))
    logits = torch.full((rows, experts), -1.0).scatter_(1, ids.long(), 1.0)
    same, _, expert, job_pairs, slots = naive.route(logits, resident, table, chosen, normalise=True)
    assert torch.equal(same, ids.long())
    out = Jobs.room(rows, chosen, device).fill_(-77)
    got = torch.full((pairs,), -77, dtype=torch.int32, device=device)
    jobs.jobs(ids.to(device), resident.to(device), table.to(device), out, got)
    assert torch.equal(out.expert.cpu(), expert)
    assert torch.equal(out.pairs.cpu()[expert >= 0], job_pairs[expert >= 0])
    assert torch.equal(got.cpu(), slots)
