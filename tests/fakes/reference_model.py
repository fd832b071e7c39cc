"""A small random checkpoint twice: as transformers runs it, and as a pack that the lane's model runs.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import logging as transformers_logging
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from bench.checkpoint import write_checkpoint
from bench.tiny_model import TinyConfig
from lanes.experts.naive import NaiveExperts
from lanes.models import Model, load_model
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.state.pool import StatePool
from lanes.state.sequence import Allocate, SequenceState
from lanes.window import Window
from shared_experts.convert import convert
from shared_experts.layout import record_offset
from shared_experts.pack import Pack

TOLERANCE = 2e-4  # of scale, fp32; scale is the greatest |logit| of the reference


def poisoned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Fresh memory that no result survives being read from."""
    return torch.full(size, float("nan"), dtype=dtype)


@dataclass(frozen=True)
class Twins:
    reference: Qwen4ExpForCausalLM
    model: Qwen4Exp

    def pool(self, allocate: Allocate = poisoned) -> StatePool:
        return StatePool(self.model.state_shape, 1 << 30, allocate=allocate)

    def state(self, tokens: int = 512) -> SequenceState:
        return SequenceState(self.model.state_shape, tokens, allocate=poisoned)

    @torch.no_grad()
    def expected(self, ids: Sequence[int]) -> torch.Tensor:
        """The reference's logits [T, V] of one pass over `ids`, without a cache."""
        with lowest_index_topk():
            return self.reference(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def logits(self, ids: Sequence[int], chunk: int, state: SequenceState | None = None) -> torch.Tensor:
        """The lane's logits [T, V], in windows of `chunk` rows."""
        states = {0: state or self.state(max(len(ids), 1))}
        start = states[0].length
        return torch.cat(
            [
                self.model.forward(Window.of_sequence(list(ids[i : i + chunk]), start + i, 0, logits="all"), states)
                for i in range(0, len(ids), chunk)
            ]
        )


def naive_experts(pack: Pack) -> NaiveExperts:
    """Experts read from the pack's file."""
    info, data = pack.manifest.experts, memoryview(pack.experts_path.read_bytes())

    def record(layer: int, expert: int) -> memoryview:
        at = record_offset(layer, expert, info.experts, info.record_bytes)
        return data[at : at + info.record_bytes]

    return NaiveExperts(info.layout, record)


@contextlib.contextmanager
def pack_of(source: Path, experts: str, dense: str = "f32") -> Iterator[Pack]:
    """A pack of a checkpoint, beside it."""
    target = source.parent / f"{source.name}-{experts}-{dense}.pack"
    if not target.exists():
        convert(source, target, experts=experts, dense=dense, threads=1)
    with Pack.open(target) as pack:
        yield pack


@contextlib.contextmanager
def twins(
    folder: Path, config: TinyConfig, *, seed: int = 0, eos_ids: list[int] | None = None, drafts: bool = False
) -> Iterator[Twins]:
    """Both models of one fp32 checkpoint; `drafts`: ours with its draft layer."""
    source = write_checkpoint(folder / "checkpoint", config, seed, tokenizer=False)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    reference = Qwen4ExpForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    with pack_of(source, "f32") as pack:
        model: Model = load_model(pack, naive_experts(pack), drafts=drafts)
        assert isinstance(model, Qwen4Exp)
        yield Twins(reference, model)


@contextlib.contextmanager
def lowest_index_topk() -> Iterator[None]:
    """Inside, `tensor.topk(k, dim=0)` gives equal values to the lowest index, which torch leaves open.

    The reference's indexer asks in exactly this way, and its scores are often exactly zero.
    """
    plain = torch.Tensor.topk

    def stable(self: torch.Tensor, k: int, dim: int = -1, **options: bool) -> object:
        if dim != 0 or self.dim() != 1:
            return plain(self, k, dim, **options)
        values, indices = self.sort(descending=True, stable=True)
        return torch.return_types.topk((values[:k], indices[:k]))

    torch.Tensor.topk = stable  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = plain  # type: ignore[method-assign]


def disagreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The greatest difference of logits, in units of scale; NaN counts as infinite."""
    return float(((ours - theirs).abs().max() / theirs.abs().max()).nan_to_num(float("inf")))


def margins(logits: torch.Tensor) -> torch.Tensor:
    """First minus second greatest logit of each row, in units of the rows' common scale."""
    top = torch.topk(logits, 2, dim=-1).values
    return (top[:, 0] - top[:, 1]) / logits.abs().max()
