"""The dense weights of a synthetic model: one safetensors file, written in place by many threads.

Names, shapes and sizes of values are those of the small random models (`bench.tiny_model`), which keep activations
lively and finite; embedding, head and routers are `routing`'s. Not here: experts, n-gram tables.

Invariant: the bytes depend on shape and seed only, not on threads.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.checkpoint import Stored, safetensors_header
from bench.synthetic.noise import Noise, runs
from bench.synthetic.routing import Routing, embedding_runs
from bench.tiny_model import Tensor, plan_tensors
from shared_experts.floats import load_floats
from shared_experts.pack import dense_dtype

EMBEDDING, HEAD, ROUTER = "model.embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight"
_ELSEWHERE = (".mlp.experts.", ".ple_embedding.")

Place = npt.NDArray[Any]  # uint16 for bf16, or float32: [rows, columns]


def write(path: Path, routing: Routing, *, threads: int) -> int:
    """Writes the file, which must not be there, and returns its bytes."""
    tensors = [
        tensor
        for tensor in plan_tensors(routing.shape.config, 0, "fused", "model.", routing.shape.draft_layers > 0)
        if not any(part in tensor.name for part in _ELSEWHERE)
    ]
    stored = [_stored(tensor) for tensor in sorted(tensors, key=lambda t: (_dtype(t) != "f32", t.name))]
    header = safetensors_header(stored)
    size = len(header) + sum(one.bytes for one in stored)
    with path.open("xb+") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            memory[: len(header)] = header
            places = _places(memory, len(header), stored)
            jobs = [job for tensor in tensors for job in _jobs(tensor, places[tensor.name], routing)]
            with ThreadPoolExecutor(threads) as pool:
                for done in [pool.submit(job) for job in jobs]:
                    done.result()
            del places, jobs, done  # a map with views cannot be closed
    return size


def _dtype(tensor: Tensor) -> str:
    return dense_dtype(tensor.shape, "bf16")


def _stored(tensor: Tensor) -> Stored:
    return Stored(tensor.name, tensor.shape, {"bf16": "BF16", "f32": "F32"}[_dtype(tensor)], bytes)


def _places(memory: mmap.mmap, start: int, stored: list[Stored]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for one in stored:
        dtype = np.uint16 if one.dtype == "BF16" else np.float32
        flat = np.frombuffer(memory, dtype, math.prod(one.shape), start)
        places[one.name] = flat.reshape(one.shape[0], -1)
        start += one.bytes
    return places


def _jobs(tensor: Tensor, place: Place, routing: Routing) -> Iterator[Callable[[], None]]:
    """What fills a tensor, in pieces."""
    if tensor.name == EMBEDDING:
        for run in embedding_runs(routing.shape):
            yield lambda run=run: _put(place, slice(run[1], run[2]), routing.embedding(*run))  # type: ignore[misc]
    elif tensor.name == HEAD:
        for run in embedding_runs(routing.shape):
            yield lambda run=run: _put(place, *routing.head(*run))  # type: ignore[misc]
    elif tensor.name.endswith(ROUTER):
        first = routing.shape.config.num_hidden_layers * tensor.name.startswith("mtp.")
        yield lambda: _put(place, slice(None), routing.router(first + int(tensor.name.split(".")[2])))
    else:
        for run in runs(*place.shape):
            yield lambda run=run: _put(place, slice(run[1], run[2]), _plain(tensor, run, routing.noise))  # type: ignore[misc]


def _plain(tensor: Tensor, run: tuple[int, int, int], noise: Noise) -> npt.NDArray[np.float32]:
    number, first, end = run
    assert tensor.normal is not None, tensor.name
    std, mean = tensor.normal
    columns = math.prod(tensor.shape[1:])
    values = noise.unit(tensor.name, number, (end - first) * columns)
    values *= np.float32(std)
    values += np.float32(mean)
    return values.reshape(end - first, columns)


def _put(place: Place, rows: slice | npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
    if place.dtype == np.float32:
        place[rows] = values
    else:
        place[rows] = load_floats().to_bf16(np.ascontiguousarray(values).reshape(-1)).reshape(values.shape)
