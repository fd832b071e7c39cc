"""One small pack as a lane on the CPU runs it and as a lane on a GPU does: what checks and tests of GPU lanes compare.

On device "cpu" the GPU's kernels run in Triton's interpreter. Not here: what is compared (exactness_cases, tests).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.checkpoint import write_checkpoint
from bench.quality import FileRecords
from bench.tiny_model import TinyConfig
from lanes.counters import Counters
from lanes.device.arena import Arena
from lanes.device.host import PinnedHost
from lanes.device.registered import Registered
from lanes.device.side import Side
from lanes.device.staging import Staging, size_for
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache, slots_of
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.share import Share
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.gpu.start import start_share
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.kernels import experts as expert_kernels
from lanes.kernels import mixing, products
from lanes.models import Model, load_model
from lanes.models.load import DTYPES
from lanes.models.qwen4_exp.gpu.model import GpuQwen4Exp
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.checkpoint import Checkpoint
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.convert import convert
from shared_experts.layout import RecordLayout
from shared_experts.pack import Pack

# One layer of each kind and an n-gram layer; blocks of 4 tokens, 8 of them are read.
SMALL = TinyConfig(
    vocab_size=300, hidden_size=64, num_hidden_layers=3, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=3,
    layer_types=("linear_attention", "linear_attention", "full_attention"), ngram_vocab_size_base=100,
)  # fmt: skip
CONTEXT = 256
ARENA_BYTES = 16 << 20  # of states that wait


class PinnedRecords:
    """The records of a pack where a GPU reads them: a copy in pinned memory."""

    def __init__(self, pack: Pack) -> None:
        self._info = pack.manifest.experts
        data = np.frombuffer(pack.experts_path.read_bytes(), np.uint8)
        self._memory = torch.from_numpy(data.copy()).pin_memory()

    def record_address(self, layer: int, expert: int) -> int:
        """Where the device finds them: registered memory has one address on both sides."""
        return self._memory.data_ptr() + (layer * self._info.experts + expert) * self._info.record_bytes


@dataclass
class Lane:
    """A model with its experts and one sequence at a time, as the runner uses them."""

    model: Model
    experts: ExpertStore | GpuExperts
    counters: Counters
    states: StatePool
    prompter: Lane | None = None  # reads prompts in this one's place
    share: Share | None = None  # of misses, the CPU's
    kept: object = None  # what must live as long as the lane
    context_tokens: int = CONTEXT  # of each sequence

    def close(self) -> None:
        """Ends its threads."""
        if self.share is not None:
            self.share.close()

    def begin(self, ids: Sequence[int]) -> int:
        """The slot of a sequence that has read these ids."""
        slot = self.states.open(self.context_tokens)
        if self.prompter is None:
            self.windows(ids, slot, [len(ids)], logits="none")
            return slot
        other = self.prompter.begin(ids)
        mine, its = self.states[slot], self.prompter.states[other]
        mine.reserve(its.length)
        for new, old in zip(mine.rows(0, its.length), its.rows(0, its.length), strict=True):
            new.copy_(old)
        Checkpoint.of(its).into(mine)
        self.prompter.states.close(other)
        return slot

    def windows(self, ids: Sequence[int], slot: int, sizes: Sequence[int], *, logits: str = "all") -> torch.Tensor:
        """Logits [T, V] of the ids after what the slot has, in windows of those sizes; the last size repeats."""
        out, at, number = [], 0, 0
        while at < len(ids):
            size = sizes[min(number, len(sizes) - 1)]
            window = Window.of_sequence(list(ids[at : at + size]), self.states[slot].length, slot, logits=logits)
            out.append(self.model.forward(window, self.states).cpu().clone())
            self.experts.end_window()
            at, number = at + size, number + 1
        return torch.cat(out)

    def trial(self, ids: Sequence[int], slot: int, right: int) -> torch.Tensor:
        """Logits of a trial window, of which the first `right` rows are kept; with 0 it is left as it is."""
        window = Window.of_sequence(list(ids), self.states[slot].length, slot, logits="all", trial=True)
        logits = self.model.forward(window, self.states).cpu().clone()
        if right:
            self.model.commit(self.states[slot], right)
            self.experts.keep(right)
        self.experts.end_window()
        return logits


@contextlib.contextmanager
def small_pack(folder: Path, config: TinyConfig = SMALL, experts: str = "q4g64", dense: str = "f32") -> Iterator[Pack]:
    """A pack of a random checkpoint."""
    source, target = folder / "checkpoint", folder / f"{experts}-{dense}.pack"
    if not source.exists():
        write_checkpoint(source, config, 0, tokenizer=False, mtp=True)
    if not target.exists():
        convert(source, target, experts=experts, dense=dense, threads=1)
    with Pack.open(target) as pack:
        yield pack


def wide_tiles(layout: RecordLayout) -> None:
    """From here on kernels of windows have few large programs: of the interpreter's time most goes into their number,
    and no result depends on it."""
    widest = 256
    gate, down = (min(size & -size, widest) for size in (layout.intermediate, layout.hidden))
    expert_kernels.GATE_TILE, expert_kernels.DOWN_TILE = (gate, 4), (down, 4)
    products.PROGRAMS, mixing.LOWER_ROWS, mixing.LIFT_ROWS = 1, 32, widest


def first_layers(model: Qwen4Exp, layers: int | None) -> None:
    """The model ends behind so many of its layers."""
    if layers is not None:
        del model.blocks[2 * layers + sum(layer < layers for layer in model.spec.ngram_layers) :]


def types_of(pack: Pack, device: str) -> torch.dtype | None:
    """Of the matrices of `gpu_lane` there; None: a lane on the CPU has its own."""
    return DTYPES[pack.manifest.dense_dtype] if device == "cuda" else None


def cpu_lane(
    pack: Pack, *, drafts: bool = False, dtype: torch.dtype | None = None, context_tokens: int = CONTEXT,
    layers: int | None = None,
) -> Lane:  # fmt: skip
    """As `lanes.startup.cpu_parts` makes it, without a cache. With a type it rounds what a GPU with such matrices does:
    their inputs, keys and values."""
    info, counters = pack.manifest.experts, Counters()
    records = FileRecords(pack)
    kernel = ExpertKernel(info.layout, threads=1)
    store = ExpertStore(kernel, ExpertCache(records, info, 0, adaptive, counters), counters)
    model = load_model(pack, store, dtype=dtype, drafts=drafts)
    assert isinstance(model, Qwen4Exp)
    first_layers(model, layers)
    states = StatePool(model.state_shape, 1 << 30)
    return Lane(model, store, counters, states, kept=kernel, context_tokens=context_tokens)


def gpu_lane(
    pack: Pack, device: str = "cpu", *, slots: int = 0, drafts: bool = False, capture: bool | None = None,
    dtype: torch.dtype | None = None, shared: bool = False, context_tokens: int = CONTEXT, layers: int | None = None,
) -> Lane:  # fmt: skip
    """As `lanes.startup_cuda` makes it, with a cache of so many records. Interpreted, it has its prompts read for it:
    that would take minutes."""
    info, counters = pack.manifest.experts, Counters()
    budget = slots * info.record_bytes
    records: FileRecords | PinnedRecords = FileRecords(pack)
    memory: DeviceSlots | None = None
    if device == "cuda":
        records = PinnedRecords(pack)
        memory = DeviceSlots(slots_of(info, budget), info.record_bytes, torch.device(device, 0))
    cache = ExpertCache(records, info, budget, adaptive, counters, memory, swap_bytes=max(1, budget))
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    chosen = Spec.from_config(pack.manifest.config).experts_per_token
    experts = GpuExperts(cache, info, chosen, counters, where)
    kernel, share = None, None
    if shared:
        kernel = ExpertKernel(info.layout, threads=2)
        share = start_share(experts, cache, kernel, records.record_address(0, 0), lambda *_: None).share
    inner = load_model(pack, experts, device=where, dtype=dtype, drafts=drafts)
    assert isinstance(inner, Qwen4Exp)
    first_layers(inner, layers)
    captures = device == "cuda" if capture is None else capture
    side = Side(where)
    arena = Arena(ARENA_BYTES, Registered() if device == "cuda" else None)
    host = PinnedHost(arena, side, Staging(side, size_for(inner.state_shape)))
    model = GpuQwen4Exp(inner, experts, context_tokens, capture=captures, host=host)
    prompter = None if device == "cuda" else cpu_lane(
        pack, drafts=drafts, context_tokens=context_tokens, layers=layers
    )  # fmt: skip
    states = StatePool(model.state_shape, 1 << 30, host=host, branch=model.branch)
    return Lane(model, experts, counters, states, prompter, share, kernel, context_tokens)
