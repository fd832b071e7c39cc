"""From a pack to a model: picks the architecture and hands its pieces over as torch tensors.

Not here: trust. Whoever opened the pack decides whether its digests were checked. The pack must stay open as long as
the model lives: n-gram rows are read from it as they are needed. The pack's `mtp.*` tensors are read for drafts only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from lanes.counters import Counters
from lanes.experts.protocol import Experts
from lanes.models.errors import ConfigError
from lanes.models.near import Near
from lanes.models.pack_table import PackTable
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from lanes.window import Meanwhile, Window, nothing
from shared_experts.pack import Pack
from shared_experts.row_reader import DEFAULT_CACHE_BYTES

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Model(Protocol):
    """What every architecture offers."""

    spec: Spec
    state_shape: StateShape
    device: torch.device
    dtype: torch.dtype  # of matrices, keys and values
    near: Near | None  # steers the experts of windows that may be steered; None, as a model is loaded: exact

    def forward(
        self, window: Window, states: Mapping[int, SequenceState], meanwhile: Meanwhile = nothing
    ) -> torch.Tensor:
        """Runs the rows: fp32 logits [rows that want them, V], in row order, finite unless the weights are not.

        They may lie where the next window's will. `meanwhile()` is called beside the window or before it.
        """
        ...

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Tokens start..end-1 of the sequence `ids` will soon be rows: what they need from disk begins to be read."""
        ...

    def forget_hints(self) -> None:
        """Hinted tokens will not come."""
        ...

    def erase(self) -> None:
        """Zeroes what buffers hold of earlier windows: the next one is another tenant's."""
        ...

    def settle(self, state: SequenceState) -> None:
        """Whatever an earlier window still owes the state is in it afterwards: before it is copied or waits."""
        ...

    def commit(self, state: SequenceState, rows: int) -> None:
        """The first `rows` rows of the state's trial window belong to the sequence, the others never were."""
        ...

    def narrow_guesses(self, token_ids: Sequence[int]) -> None:
        """From now on `guess` answers with the logits of these tokens, in this order."""
        ...

    @property
    def chains(self) -> bool:
        """Whether `guess` makes several at once."""
        ...

    def guess(
        self, state: SequenceState, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> torch.Tensor | list[tuple[int, float]]:
        """Logits fp32 [V] of what may follow `token`, which follows the sequence (number 0) or the guess before it.

        With `best`, where the model has it: of so many guesses, each the input of the next, or of one alone, the place
        of the greatest (-1 where one is not finite, and from there on) and its probability. `meanwhile()` is called
        once the device has its work, or before.
        """
        ...


def load_model(
    pack: Pack,
    experts: Experts,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    ngram_cache_bytes: int = DEFAULT_CACHE_BYTES,
    counters: Counters | None = None,
    drafts: bool = False,
) -> Model:
    """The pack's model with its dense weights on `device`, matrices in `dtype`; n-gram rows in a cache of that size.

    With `drafts` its draft layer too, which the pack must have (else ConfigError): `guess` then works, and a state has
    room for it.

    Without `dtype`: the pack's on a GPU; fp32 on a CPU, where every bf16 weight is exact and a prompt chunk runs faster
    (64 rows of 10240 x 2560 on one AVX-512 core: 38 against 53 ms in bf16). A single row is up to 1.6 times slower and
    memory doubles, so a large model on a CPU asks for bf16.
    """
    manifest = pack.manifest
    build = _architecture(pack)
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else DTYPES[manifest.dense_dtype]
    counters = Counters() if counters is None else counters

    def table(layer: int) -> PackTable:
        reader = pack.row_reader(layer, ngram_cache_bytes // len(manifest.ngram))
        return PackTable(reader, counters, pinned=device.type == "cuda")

    return build(manifest.config, Weights(_dense_tensors(pack), device, dtype), experts, table, drafts)


def dense_bytes(pack: Pack, *, drafts: bool = False) -> int:
    """Bytes of GPU memory that `load_model` takes for dense weights, without reading one of them."""
    manifest = pack.manifest
    weights = Weights(_dense_tensors(pack), torch.device("meta"), DTYPES[manifest.dense_dtype])
    _architecture(pack)(manifest.config, weights, _NoExperts(), lambda layer: None, drafts)
    return sum(weights.sizes)


class _NoExperts:
    """Of a model that nobody runs."""

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        raise AssertionError("a model without experts was run")

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a model without experts was run")


Table = Callable[[int], Any]  # by 0-based decoder layer: a PackTable, or None in a model that nobody runs


def _qwen4_exp(config: Mapping[str, object], weights: Weights, experts: Experts, table: Table, drafts: bool) -> Model:
    spec = Spec.from_config(config)
    if drafts and not spec.draft_layers:
        raise ConfigError("mtp_num_hidden_layers", "is 0: the model has no draft layer")
    return Qwen4Exp(spec, weights, experts, {layer: table(layer) for layer in spec.ngram_layers}, drafts=drafts)


Build = Callable[[Mapping[str, object], Weights, Experts, Table, bool], Model]
_ARCHITECTURES: dict[str, Build] = {"qwen4_exp": _qwen4_exp}


def _architecture(pack: Pack) -> Build:
    name = pack.manifest.architecture
    if name not in _ARCHITECTURES:
        raise ConfigError("architecture", f"{name!r} is not one of {', '.join(_ARCHITECTURES)}")
    return _ARCHITECTURES[name]


def _dense_tensors(pack: Pack) -> Callable[[str], torch.Tensor]:
    """Reads the pack's dense tensors as views of its file."""
    dense = pack.dense()

    def read(name: str) -> torch.Tensor:
        dtype, shape, data = dense.read(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given", category=UserWarning)  # a view that we only read
            flat = torch.from_numpy(np.frombuffer(data, np.uint8))
        return flat.view(DTYPES[dtype]).view(shape)

    return read
