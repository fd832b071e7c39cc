"""Makes a loaded model's eager blocks run a prompt's rows by kernels where there is one. Not here: kernels, blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from lanes.kernels import delta_chunks, prompt_delta, prompt_route, prompt_stream
from lanes.kernels.fetch import fetch
from lanes.models.delta_rule import RECURRENT_TOKENS, recurrent
from lanes.models.ops import product
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.gpu.deltanet import delta_shape
from lanes.models.qwen4_exp.gpu.reader import PromptReader
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.moe import Moe, route
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Block, Connected, Mixer, Owed, Streams


class DeltaKernels:
    """Implements `lanes.models.qwen4_exp.deltanet.Kernels` for one layer."""

    def __init__(self, block: DeltaNet, spec: Spec) -> None:
        self._block, self._eps, self._silu = block, spec.eps, spec.gate == "silu"
        self._shape = delta_shape(spec)

    def rows(self, qkv: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three views of one tensor."""
        shape = self._shape
        mixed = torch.empty(qkv.shape, device=qkv.device)
        prompt_delta.mix(shape, qkv, tail, self._block.filter, mixed)
        last = tail.shape[0]
        tail.copy_(qkv[-last:] if qkv.shape[0] >= last else torch.cat((tail, qkv))[-last:])
        keys = shape.key_heads * shape.key_dim
        q, k, v = mixed.split((keys, keys, shape.value_heads * shape.value_dim), dim=1)
        return (
            q.unflatten(1, (shape.key_heads, -1)), k.unflatten(1, (shape.key_heads, -1)),
            v.unflatten(1, (shape.value_heads, -1)),
        )  # fmt: skip

    def rule(
        self, matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """By chunks, but for the few tokens that lanes.models.delta_rule takes one by one."""
        if q.shape[0] > RECURRENT_TOKENS:
            return delta_chunks.delta_rule(matrix, q, k, v, g, beta)
        shared = v.shape[1] // k.shape[1]
        return recurrent(matrix, q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1), v, g, beta)

    def finish(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """In the type of the output's matrix."""
        result = torch.empty(z.shape, dtype=self._block.output.dtype, device=z.device)
        prompt_delta.finish(out, z, self._block.norm, result, self._eps, silu=self._silu)
        return result


class Fetched:
    """Rows of host memory read by a kernel: a copy on the computing stream would wait for all records on the link."""

    def __init__(self, held: int) -> None:
        """So many uploads of a window: their rows stay until later ones come, when the device is past them."""
        self._held: deque[torch.Tensor] = deque(maxlen=held)

    def __call__(self, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """As `lanes.models.ops.upload`."""
        rows = rows if rows.is_pinned() or device.type != "cuda" else rows.pin_memory()
        self._held.append(rows)
        there = torch.empty(rows.shape, dtype=rows.dtype, device=device)
        fetch(rows.view(torch.int32), there.view(torch.int32))
        return there

    def erase(self) -> None:
        """Zeroes what is held; the device is past it."""
        for rows in self._held:
            rows.zero_()
        self._held.clear()


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Of one model, shared by its layers."""

    spec: Spec
    reader: PromptReader

    def give(self, block: Block) -> None:
        """It uses them from here on."""
        if isinstance(block, Attention):
            block.reader = self.reader
        if isinstance(block, DeltaNet) and prompt_delta.serves(delta_shape(self.spec)):
            block.kernels = DeltaKernels(block, self.spec)
        if isinstance(block, Moe):
            block.route = routed

    def take(self, block: Block) -> None:
        """It runs as on any device from here on."""
        if isinstance(block, Attention):
            block.reader = None
        if isinstance(block, DeltaNet):
            block.kernels = None
        if isinstance(block, Moe):
            block.route = route


def kernels_of(spec: Spec) -> PromptKernels:
    """Sizes only; nothing is allocated."""
    return PromptKernels(spec, PromptReader(spec))


def routed(logits: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`lanes.models.qwen4_exp.moe.route` by a kernel; ids are int32."""
    ids = torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, device=logits.device)
    prompt_route.route(logits, ids, weights, normalise=normalise)
    return ids, weights


def use_kernels(model: Qwen4Exp, context_tokens: int) -> Fetched:
    """In the decoder layers; what a first short prompt would not compile is compiled now. What uploads are held by."""
    kernels = kernels_of(model.spec)
    kernels.reader.warm(context_tokens, model.device)
    model.upload = fetched = Fetched(1 + len(model.ngrams))
    for layer in model.ngrams:
        layer.upload = fetched
    for connected in model.blocks:
        if isinstance(connected, Connected):
            connected.mixing = mixed
            kernels.give(connected.block)
    return fetched


def mixed(mixer: Mixer, x: Streams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`lanes.models.qwen4_exp.stream.Mixing` by kernels."""
    owed = (x.injection, x.result.contiguous()) if isinstance(x, Owed) else None
    x = x.x if isinstance(x, Owed) else x
    rows, streams, hidden = x.shape
    down, up = mixer.down, mixer.up
    scale, injection = (torch.empty((rows, streams), device=x.device) for _ in range(2))
    rounded = torch.empty(x.shape, dtype=down.dtype, device=x.device)
    prompt_stream.enter(x, owed, mixer.norm, rounded, scale, mixer.eps)
    squashed = torch.empty((rows, mixer.lowrank), dtype=up.dtype, device=x.device)
    prompt_stream.squash(product(rounded.flatten(1), down), squashed, injection)
    u = torch.empty((rows, hidden), device=x.device)
    prompt_stream.lift(squashed, up, x, scale, mixer.norm, u)
    return x, u, injection
