"""From a pack to a model: picks the architecture and hands its pieces over as torch tensors.

Not here: trust. Whoever opened the pack decides whether its digests were checked. The pack must stay open as long as
the model lives: n-gram rows are read from it as they are needed. The pack's `mtp.*` tensors are not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from lanes.experts.protocol import Experts
from lanes.models.errors import ConfigError
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from lanes.window import Window
from shared_experts.ngram import NgramTable
from shared_experts.pack import Pack

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Model(Protocol):
    """What every architecture offers."""

    spec: Spec
    state_shape: StateShape
    device: torch.device
    dtype: torch.dtype  # of matrices, keys and values

    def forward(self, window: Window, states: Mapping[int, SequenceState]) -> torch.Tensor:
        """Runs the rows: fp32 logits [rows that want them, V], in row order, finite unless the weights are not."""
        ...


def load_model(
    pack: Pack, experts: Experts, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Model:
    """The pack's model with its dense weights on `device`, matrices in `dtype`.

    Left out: the pack's type on a GPU; fp32 on a CPU, where every bf16 weight is exact and a prompt chunk runs faster
    (64 rows of 10240 x 2560 on one AVX-512 core: 38 against 53 ms in bf16). A single row is up to 1.6 times slower and
    memory doubles, so a large model on a CPU asks for bf16.
    """
    manifest = pack.manifest
    if manifest.architecture not in _ARCHITECTURES:
        raise ConfigError("architecture", f"{manifest.architecture!r} is not one of {', '.join(_ARCHITECTURES)}")
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else DTYPES[manifest.dense_dtype]
    return _ARCHITECTURES[manifest.architecture](pack, experts, device, dtype)


def _qwen4_exp(pack: Pack, experts: Experts, device: torch.device, dtype: torch.dtype) -> Model:
    spec = Spec.from_config(pack.manifest.config)
    weights = Weights(_dense_tensors(pack), device, dtype)
    return Qwen4Exp(spec, weights, experts, {layer: PackTable(pack.ngram(layer)) for layer in spec.ngram_layers})


_ARCHITECTURES: dict[str, Callable[[Pack, Experts, torch.device, torch.dtype], Model]] = {"qwen4_exp": _qwen4_exp}


class PackTable:
    """An n-gram table of a pack, with the constants that its checkpoint stored."""

    def __init__(self, table: NgramTable) -> None:
        self._table, info = table, table.info
        self.multipliers = torch.tensor(info.multipliers, dtype=torch.int64)
        self.offsets = torch.tensor(info.head_offsets, dtype=torch.int64)
        self.sizes = torch.tensor(info.head_vocab_sizes, dtype=torch.int64)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [R, N * columns] for row ids int64 [R, N]."""
        return torch.from_numpy(self._table.rows(ids.flatten().numpy())).view(ids.shape[0], -1)


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
