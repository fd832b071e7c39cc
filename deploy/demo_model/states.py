"""A training state on disk: weights, optimisers and counters, in one safetensors file written in one step.

Invariant: the file is whole or not there; loading it and going on gives the step that would have come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deploy.demo_model.model.network import Network


@dataclass(slots=True)
class Counters:
    """How far training is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of steps, without compilation and starts
    windows: dict[str, int] = field(default_factory=dict)  # used, by tokens of a window


def save(path: Path, network: Network, optimisers: Sequence[torch.optim.Optimizer], counters: Counters) -> None:
    """Writes the state."""
    tensors = {f"network.{name}": value for name, value in network.state_dict().items()}
    for number, optimiser in enumerate(optimisers):
        for key, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{key}.{name}": value for name, value in state.items()}
    partial = path.with_suffix(".partial")
    metadata = {"counters": json.dumps(asdict(counters))}
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial, metadata)
    os.replace(partial, path)


def load(path: Path, network: Network, optimisers: Sequence[torch.optim.Optimizer]) -> Counters:
    """Puts a state back and returns its counters."""
    weights: dict[str, torch.Tensor] = {}
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimisers]
    with safe_open(path, "pt") as file:
        counters = Counters(**json.loads(file.metadata()["counters"]))
        for name in file.keys():  # noqa: SIM118
            kind, rest = name.split(".", 1)
            if kind == "network":
                weights[rest] = file.get_tensor(name)
            else:
                number, key, part = rest.split(".")
                states[int(number)].setdefault(int(key), {})[part] = file.get_tensor(name)
    network.load_state_dict(weights)
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return counters
