"""What `bench.gpu_kernels` runs: every kernel at one model's sizes, layer by layer, and the twin its values must match.

Layers have their own data where a token reads them from memory (records, states) and share what a token keeps in the
cache (rows). Not here: time. Invariant: what `layer` launches is what a decode window launches, nothing else.

Letters: T rows, K experts per row, J jobs, H hidden, I intermediate, S streams, L low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lanes.kernels import combine, delta_step, deltanet, experts, naive, route, sampling, stream
from lanes.kernels.post import Post
from lanes.kernels.products import FEW_ROWS
from lanes.kernels.rows import Jobs, QuantisedRows
from lanes.models.ops import rms
from shared_experts.layout import EXPERT_FORMATS, RecordLayout

SHARED_BY_ROWS = 2  # experts that all rows of a window choose; the others are chosen by one row each
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; the defaults are the real one's."""

    layers: int = 48
    hidden: int = 2560
    inner: int = 640
    experts: int = 512
    chosen: int = 10
    streams: int = 4
    lowrank: int = 320
    key_heads: int = 16
    value_heads: int = 48
    delta_dim: int = 128
    heads: int = 24
    head_dim: int = 256
    rotated: int = 64
    attention_layers: int = 12
    kv_heads: int = 2
    index_heads: int = 4
    index_dim: int = 128
    block_tokens: int = 4
    blocks_chosen: int = 512
    contexts: tuple[int, ...] = (1024, 8192, 32_768, 131_072)  # tokens
    vocabulary: int = 248_320
    format: str = "q4g64"

    @property
    def layout(self) -> RecordLayout:
        """Of one expert."""
        return RecordLayout.of(EXPERT_FORMATS[self.format], self.hidden, self.inner)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel or chain of them: `layer(i)` launches layer i's part, `check` compares values and raises."""

    name: str
    launches: int
    bytes: int  # that one layer must move, each byte once
    layer: Callable[[int], object]
    check: Callable[[], None] | None = None
    layers: int | None = None  # that have it, where not all do


class Records:
    """Every layer's records for windows of up to `most` rows, and the address tables that lead to them."""

    def __init__(self, sizes: Sizes, most: int, device: str) -> None:
        layout = self.layout = sizes.layout
        self.used = SHARED_BY_ROWS + most * (sizes.chosen - SHARED_BY_ROWS)  # experts of a layer that exist
        count = sizes.layers * self.used
        self.bytes = torch.empty((count, layout.record_bytes), dtype=torch.uint8, device=device).random_()
        group = layout.format.group
        for first, numbers in (
            (layout.gate_up_scales, 2 * sizes.inner * sizes.hidden // group),
            (layout.down_scales, sizes.hidden * sizes.inner // group),
        ):
            scales = torch.empty(numbers, dtype=torch.float16, device=device).normal_(0, 0.02)
            self.bytes[:, first : first + 2 * numbers] = scales.view(torch.uint8)
        rng = np.random.default_rng(1)
        self.ids = np.stack([rng.permutation(sizes.experts)[: self.used] for _ in range(sizes.layers)])
        self.tables = torch.zeros((sizes.layers, sizes.experts), dtype=torch.int64)
        places = self.bytes.data_ptr() + torch.arange(count).view(sizes.layers, -1) * layout.record_bytes
        self.tables.scatter_(1, torch.from_numpy(self.ids), places)
        self.tables = self.tables.to(device)

    def jobs(self, layer: int, rows: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(expert [J], pairs [J, T]) of a window, as route leaves them."""
        own = chosen - SHARED_BY_ROWS
        ids = self.ids[layer]
        picked = [
            sorted([*ids[:SHARED_BY_ROWS], *ids[SHARED_BY_ROWS + r * own : SHARED_BY_ROWS + (r + 1) * own]])
            for r in range(rows)
        ]
        expert = torch.full((rows * chosen,), -1, dtype=torch.int32)
        pairs = torch.full((rows * chosen, rows), -1, dtype=torch.int32)
        for job, id in enumerate(sorted({e for row in picked for e in row})):
            expert[job] = int(id)
            for r, row in enumerate(picked):
                if id in row:
                    pairs[job, r] = r * chosen + row.index(id)
        return expert, pairs


class ExpertLayer:
    """The experts of every layer for windows of `rows`: the launches, and where their results lie."""

    def __init__(self, sizes: Sizes, records: Records, rows: int, device: str) -> None:
        self.sizes, self.records, self.rows = sizes, records, rows
        self.layout, pairs = records.layout, rows * sizes.chosen
        self.x = torch.randn(rows, sizes.hidden, device=device)
        self.quantised = QuantisedRows.room(rows, sizes.hidden, self.layout.format.group, device)
        self.host_jobs = [records.jobs(layer, rows, sizes.chosen) for layer in range(sizes.layers)]
        self.jobs = [Jobs(expert.to(device), at.to(device)) for expert, at in self.host_jobs]
        self.h, self.y = (torch.empty((pairs, width), device=device) for width in (sizes.inner, sizes.hidden))
        self.between = QuantisedRows.room(pairs, sizes.inner, self.layout.format.group, device)
        self.weights, self.out = torch.rand(rows, sizes.chosen, device=device), torch.empty_like(self.x)
        self.slots = torch.full((pairs,), -1, dtype=torch.int32, device=device)

    def quantise(self, layer: int) -> None:
        """Of the rows."""
        experts.quantise_rows(self.x, self.quantised, self.layout.format.group)

    def gate_up(self, layer: int) -> None:
        """To h."""
        experts.gate_up(self.layout, self.records.tables[layer], self.jobs[layer], self.quantised, self.h)

    def down(self, layer: int) -> None:
        """To y, h being quantised first."""
        experts.quantise_rows(self.h, self.between, self.layout.format.group, opens=True)
        experts.down(self.layout, self.records.tables[layer], self.jobs[layer], self.between, self.y)

    def both(self, layer: int) -> None:
        """What reads records."""
        self.gate_up(layer)
        self.down(layer)

    def add(self, layer: int) -> None:
        """To out."""
        combine.combine(self.weights, self.y, self.y, self.slots, self.out)

    def all(self, layer: int) -> None:
        """What a window launches behind the router."""
        self.quantise(layer)
        self.both(layer)
        self.add(layer)

    def check(self) -> None:
        """Three jobs of the last layer, one of them of all rows: every bit; then all pairs added up, every bit."""
        self.y.fill_(float("nan"))
        self.all(self.sizes.layers - 1)
        expert, at = self.host_jobs[-1]
        of_all_rows = int((at >= 0).sum(1).argmax())
        kept = sorted({0, of_all_rows, int((expert >= 0).sum()) - 1})
        ids, only = expert[kept].long(), torch.full_like(expert, -1)
        only[kept] = expert[kept]
        records, size = self.records.bytes, self.layout.record_bytes
        places = (self.records.tables[-1].cpu()[ids] - records.data_ptr()) // size
        copies = records[places.to(records.device)].cpu()
        table = torch.zeros(self.sizes.experts, dtype=torch.int64)
        table[ids] = copies.data_ptr() + torch.arange(len(kept)) * size
        want, got = torch.full(self.y.shape, float("nan")), self.y.cpu()
        naive.experts(self.layout, table, only, at, self.x.cpu(), want)
        mine = at[kept][at[kept] >= 0].long()
        assert torch.equal(got[mine].view(torch.int32), want[mine].view(torch.int32)), "bits of y differ"
        added = torch.empty(self.out.shape)
        naive.combine(self.weights.cpu(), got, added)
        assert torch.equal(self.out.cpu(), added), "bits of the sum differ"

    def cases(self) -> Iterator[Case]:
        """The chain first: what follows works on its numbers."""
        distinct = int((self.host_jobs[0][0] >= 0).sum())
        values = self.sizes.inner * self.sizes.hidden
        down = int(values * (self.layout.format.bits / 8 + 2 / self.layout.format.group)) * distinct
        added = 4 * (self.y.numel() + self.out.numel())
        yield Case("experts: all five", 5, 3 * down + added, self.all, self.check)
        yield Case("experts: gate_up, down", 3, 3 * down, self.both)
        yield Case("experts: gate_up", 1, 2 * down, self.gate_up)
        yield Case("experts: down", 2, down, self.down)
        yield Case("experts: quantise", 1, 5 * self.x.numel(), self.quantise)
        yield Case("experts: combine", 1, added, self.add)


def route_case(sizes: Sizes, rows: int, device: str) -> Case:
    """Router logits to jobs, the rows quantised beside it; half of the experts resident, half of the misses for the
    CPU."""
    pairs = rows * sizes.chosen
    logits = torch.randn(sizes.layers, rows, sizes.experts + 1, device=device)
    resident = torch.randint(0, 2, (sizes.layers, sizes.experts), dtype=torch.int8, device=device)
    share = (torch.arange(pairs + 1, dtype=torch.int32) // 2).to(device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.full(shape, -77, dtype=torch.int32, device=device)

    out = route.Routed(
        integers(rows, sizes.chosen), torch.empty((rows, sizes.chosen), device=device),
        Jobs.room(rows, sizes.chosen, device).fill_(-77), integers(pairs),
    )  # fmt: skip

    group = sizes.layout.format.group
    x, log = torch.randn(rows, sizes.hidden, device=device), integers(rows, sizes.chosen)
    posted = Post(x, QuantisedRows.room(rows, sizes.hidden, group, device), group, log, 0, None)

    def layer(i: int) -> None:
        route.route(logits[i], resident[i], share, out, normalise=True, posted=posted)

    def check() -> None:
        layer(0)
        ids, weights, expert, _, slots = naive.route(
            logits[0].cpu(), resident[0].cpu(), share.cpu(), sizes.chosen, normalise=True
        )
        assert torch.equal(out.ids.cpu().long(), ids)
        assert torch.equal(out.jobs.expert.cpu(), expert)
        assert torch.equal(out.slots.cpu(), slots)
        torch.testing.assert_close(out.weights.cpu(), weights, rtol=2e-6, atol=1e-9)

    return Case("route", 1, rows * (sizes.experts * 4 + sizes.hidden * 5) + sizes.experts, layer, check)


def delta_cases(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """A Gated DeltaNet between its products; all rows of the window before were accepted."""
    n, d = sizes.value_heads, sizes.delta_dim
    shape = deltanet.DeltaShape(sizes.key_heads, n, d, d, taps=4)
    c = shape.channels
    projected, ba = (torch.randn(rows, width, device=device) for width in (c + n * d, 2 * n))
    qkv, z = projected[:, :c], projected[:, c:]
    taps, rate, shift, norm = (torch.rand(size, device=device) for size in ((4, c), (n,), (n,), (d,)))
    rate = -rate
    state = torch.randn(sizes.layers, n, d, d, device=device) * 0.3
    tail = torch.randn(sizes.layers, 3, c, device=device)
    raw = torch.zeros(sizes.layers, 4, c, device=device)

    def empty() -> deltanet.DeltaRows:
        return deltanet.DeltaRows(*(torch.zeros(4, width, device=device) for width in (c, n, n)))

    pending, replay = [empty() for _ in range(sizes.layers)], empty()
    accepted = torch.zeros(1, dtype=torch.int32, device=device)
    out, result = torch.empty(rows, n, d, device=device), torch.empty(rows, n * d, device=device)

    def prepare(i: int) -> None:
        deltanet.prepare(shape, qkv, ba, taps, rate, shift, tail[i], accepted, raw[i], pending[i], replay)

    def rule(i: int) -> None:
        deltanet.rule(shape, state[i], accepted, replay, pending[i], out)

    def finish(i: int) -> None:
        deltanet.finish(out, z, norm, result, EPS, silu=False)

    def step(i: int) -> None:
        prepare(i)
        rule(i)
        finish(i)

    def check(launch: Callable[[int], None]) -> None:
        """Two windows of a sequence: the second one replays the first."""
        accepted.zero_()
        old_state, old_tail = state[0].cpu(), tail[0].cpu()
        for kept in (0, rows):
            accepted.fill_(kept)
            launch(0)
            want = naive.delta_window(
                shape, qkv.cpu(), ba.cpu(), taps.cpu(), rate.cpu(), shift.cpu(), old_tail, old_state
            )
            gated = naive.gated_norm(want, z.cpu(), norm.cpu(), EPS, silu=False)
            torch.testing.assert_close(result.cpu(), gated, rtol=1e-3, atol=1e-3)

    moved = 2 * 4 * n * d * d
    yield Case("deltanet: all three", 3, moved, step, partial(check, step))
    yield Case("deltanet: prepare", 1, 4 * c * (2 * rows + 4 + 6 + 4 + rows), prepare)
    yield Case("deltanet: rule", 1, moved, rule)
    yield Case("deltanet: finish", 1, 12 * rows * n * d, finish)
    if rows > FEW_ROWS:
        return
    readers = torch.zeros(sizes.key_heads, dtype=torch.int32, device=device)

    def one(i: int) -> None:
        delta_step.step(
            shape, projected, ba, taps, rate, shift, norm, EPS, tail[i], accepted, raw[i], pending[i], state[i],
            readers, result, silu=False,
        )  # fmt: skip

    yield Case("deltanet: in one", 1, moved, one, partial(check, one))


def enter_case(sizes: Sizes, rows: int, device: str) -> Case:
    """A block's result into the streams; a layer has two. The products behind it are in bench.gpu_products."""
    s, h = sizes.streams, sizes.hidden
    x, result = torch.randn(rows, s, h, device=device), torch.randn(rows, h, device=device)
    start = x.clone()
    injection, norm = torch.rand(rows, s, device=device) * 0.1, torch.rand(sizes.layers, s, h, device=device)
    normed, rounded = torch.empty_like(x), x.bfloat16()

    def enter(i: int) -> None:
        stream.enter(x, result, injection, norm[i], normed, rounded, EPS)

    def check() -> None:
        x.copy_(start)
        enter(0)
        want = start + injection[:, :, None] * result[:, None, :]
        torch.testing.assert_close(x, want, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(normed, rms(want, EPS) * norm[0], rtol=2e-5, atol=2e-6)

    return Case("stream: enter", 1, rows * s * h * 14 + 4 * s * h, enter, check)


def greatest_case(sizes: Sizes, rows: int, device: str) -> Case:
    """Greedy tokens; once a window, not once a layer."""
    logits = torch.randn(rows, sizes.vocabulary, device=device)
    scratch = torch.empty((rows, sampling.blocks(sizes.vocabulary)), dtype=torch.int64, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)

    def layer(i: int) -> None:
        sampling.greatest(logits, scratch, out)

    def check() -> None:
        layer(0)
        assert out.tolist() == logits.cpu().numpy().argmax(1).tolist()

    return Case("sampling: greatest (once a window)", 2, 4 * logits.numel(), layer, check)


def dense_cases(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """Everything between products but the experts, in the order of a layer."""
    yield route_case(sizes, rows, device)
    yield from delta_cases(sizes, rows, device)
    yield enter_case(sizes, rows, device)
    yield greatest_case(sizes, rows, device)
