"""Parts of the network compiled, each only where what it computes there equals what it computes uncompiled.

A compiled layer has trained with gradients thirty thousand times too long while its answers were right, so nothing is
believed: outputs and gradients of one real batch are compared first, kind by kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deploy.demo_model.model.deltanet import DeltaNet
from deploy.demo_model.model.moe import Moe
from deploy.demo_model.model.network import Network
from deploy.demo_model.model.parts import Inject, Mixer

KINDS = (Inject, Mixer, Moe, DeltaNet)  # an n-gram gate is a square root near zero: bf16 noise alone is 0.7 apart
MOST_APART = 0.3  # relative, of an output or a gradient: bf16 sums in another order are 0.03 apart


def compile_parts(network: Network, run: Callable[[], None], say: Callable[[dict[str, object]], None]) -> None:
    """Compiles the trunk's parts of every kind that holds; `run` is a forward pass of a real batch, `say` is told."""
    torch._dynamo.config.recompile_limit = 64
    for kind in KINDS:
        began, parts = time.monotonic(), [m for m in network.model.layers.modules() if isinstance(m, kind)]
        seen = _inputs(parts[0], run)
        truth = _answers(parts[0], seen)
        for part in parts:
            part.compile(dynamic=False)
        try:
            apart = max(_apart(a, b) for a, b in zip(_answers(parts[0], seen), truth, strict=True))
        except Exception as error:  # a compiler fails in many ways, and training can do without it
            apart = float("inf")
            say({"compiling": kind.__name__, "error": str(error)[:200]})
        if not apart < MOST_APART:
            for part in parts:
                part._compiled_call_impl = None
        say({"compiled": kind.__name__, "used": apart < MOST_APART, "apart": round(apart, 4),
             "seconds": round(time.monotonic() - began, 1)})  # fmt: skip


@contextmanager
def uncompiled(network: Network) -> Iterator[None]:
    """Within, every part runs as it is written: for shapes that come too seldom to compile."""
    held = {m: m._compiled_call_impl for m in network.modules() if m._compiled_call_impl is not None}
    for module in held:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in held.items():
            module._compiled_call_impl = call


def _inputs(part: nn.Module, run: Callable[[], None]) -> tuple[Any, ...]:
    """What `part` is called with."""
    seen: list[tuple[Any, ...]] = []
    hook = part.register_forward_pre_hook(lambda _, args: seen.append(args))
    with torch.no_grad():
        run()
    hook.remove()
    return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in seen[0])


def _answers(part: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Outputs and all gradients, for one fixed gradient of the outputs."""
    leaves = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    part.zero_grad(set_to_none=True)
    out = part(*leaves)
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x) and x.requires_grad]
    noise = torch.Generator(outs[0].device).manual_seed(0)
    torch.autograd.backward(outs, [torch.randn(x.shape, generator=noise, device=x.device).to(x.dtype) for x in outs])
    gradients = [x.grad for x in (*leaves, *part.parameters()) if torch.is_tensor(x) and x.grad is not None]
    found = [x.detach().float().clone() for x in (*outs, *gradients)]
    part.zero_grad(set_to_none=True)
    return found


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
