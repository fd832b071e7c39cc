"""Cases of the small kernels of a prompt's rows, against the model's own blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from lanes.kernels.deltanet import DeltaShape
from lanes.models.ops import rms
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.gpu.prompt import DeltaKernels, mixed, routed
from lanes.models.qwen4_exp.moe import route
from lanes.models.qwen4_exp.rows import Rows, Run
from lanes.models.qwen4_exp.stream import Mixer, Owed, whole

NOT_A_NUMBER = float("nan")


def mixer_of(streams: int, hidden: int, lowrank: int, dtype: torch.dtype, device: str) -> Mixer:
    """With random weights."""
    draw = torch.Generator().manual_seed(hidden)

    def random(*size: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(size, generator=draw)).to(device)

    mixer = Mixer.__new__(Mixer)
    mixer._streams, mixer.lowrank, mixer.eps = streams, lowrank, 1e-6
    mixer.norm = 1 + random(streams, hidden, scale=0.1)
    mixer.down = random(lowrank + streams, streams * hidden, scale=(streams * hidden) ** -0.5).to(dtype)
    mixer.up = random(streams * hidden, lowrank, scale=1.0).to(dtype)
    return mixer


def check_mixing(
    device: str, rows: int, streams: int, hidden: int, lowrank: int, dtype: torch.dtype, *, owed: bool
) -> None:
    """Streams, what a block sees and its injection; rows beside a row change nothing of it."""
    draw = torch.Generator().manual_seed(rows)
    mixer = mixer_of(streams, hidden, lowrank, dtype, device)
    x, result, injection = (
        torch.randn(size, generator=draw).to(device)
        for size in ((rows, streams, hidden), (rows, hidden), (rows, streams))
    )

    def given(part: slice = slice(None)) -> torch.Tensor | Owed:
        return Owed(x[part].clone(), injection[part].clone(), result[part].clone()) if owed else x[part].clone()

    want_x = whole(given())
    want_u, want_injection = mixer(want_x)
    got_x, u, got_injection = mixed(mixer, given())
    torch.testing.assert_close(got_x, want_x, rtol=1e-6, atol=1e-6)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2  # the interpreter cuts bf16 off where torch rounds
    for ours, its in ((u, want_u), (got_injection, want_injection)):
        assert (ours - its).abs().max() <= tolerance * its.abs().max()
    if dtype == torch.float32 and device == "cpu":
        return  # products of the library depend on the number of rows
    some = slice(rows // 2, rows)
    assert torch.equal(mixed(mixer, given(some))[0], got_x[some])


def delta_of(shape: DeltaShape, dtype: torch.dtype, device: str, *, silu: bool) -> tuple[DeltaNet, Any]:
    """A layer with random weights, and what of a spec it needs."""
    spec = SimpleNamespace(
        key_heads=shape.key_heads, value_heads=shape.value_heads, key_dim=shape.key_dim, value_dim=shape.value_dim,
        conv_taps=shape.taps, conv_channels=shape.channels, eps=1e-6, gate="silu" if silu else "sigmoid",
    )  # fmt: skip
    draw = torch.Generator().manual_seed(shape.channels)
    block = DeltaNet.__new__(DeltaNet)
    block._spec, block.layer = spec, 0
    block.filter = torch.randn((shape.taps, shape.channels), generator=draw).to(device)
    block.taps = block.filter.unbind()
    block.norm = torch.randn(shape.value_dim, generator=draw).to(device)
    block.output = torch.empty(0, dtype=dtype, device=device)
    return block, spec


def check_delta(device: str, rows: int, shape: DeltaShape, dtype: torch.dtype, *, silu: bool) -> None:
    """Rows ready for the rule, the tail behind them, and what follows the rule; cut anywhere, the same to the bit."""
    draw = torch.Generator().manual_seed(rows)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(device)

    block, spec = delta_of(shape, dtype, device, silu=silu)
    kernels = DeltaKernels(block, spec)
    wide = random(rows, shape.channels + shape.value_heads * shape.value_dim)  # qkv, z
    qkv, z = wide[:, : shape.channels], wide[:, shape.channels :]
    tail = random(shape.taps - 1, shape.channels)

    mine, its, cut = (SimpleNamespace(conv=tail.clone()) for _ in range(3))
    run = Run(SimpleNamespace(recurrent={0: its}), 0, rows, 0, rows, (tail, tail))
    shared = shape.value_heads // shape.key_heads
    want = block._convolved(qkv, Rows(torch.empty(0), (run,), (tail, tail)))
    got = kernels.rows(qkv, mine.conv)
    for ours, wanted, repeats in zip(got, want, (shared, shared, 1), strict=True):
        torch.testing.assert_close(ours.repeat_interleave(repeats, 1), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.conv, its.conv)
    parts = [kernels.rows(part, cut.conv) for part in qkv.split(max(1, rows // 3))]
    for number, ours in enumerate(got):
        assert torch.equal(torch.cat([part[number] for part in parts]), ours)
    assert torch.equal(cut.conv, its.conv)
    out = random(rows, shape.value_heads, shape.value_dim)
    gate = F.silu(z) if silu else z.sigmoid()
    finished = (rms(out, 1e-6) * block.norm).flatten(1) * gate
    step = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off where torch rounds
    torch.testing.assert_close(kernels.finish(out, z).float(), finished, rtol=step, atol=1e-6)


def check_route(device: str, rows: int, experts: int, chosen: int, *, normalise: bool) -> None:
    """As the model's own, ties to the lowest id; ids in range and ascending whatever the logits are."""
    draw = torch.Generator().manual_seed(experts)
    wide = torch.randn((rows, experts + 1), generator=draw)
    wide[::3] = wide[::3].round()  # ties
    logits = wide.to(device)[:, :-1]
    ids, weights = routed(logits, chosen, normalise)
    want_ids, want = route(logits, chosen, normalise)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
    broken = logits.clone()
    broken[:, 1::2] = NOT_A_NUMBER
    ids, _ = routed(broken, chosen, normalise)
    assert (ids.diff(dim=1) > 0).all()
    assert ids.min() >= 0
    assert ids.max() < experts
