"""What keys and values as int8 cost and save: answers' distance from exact ones, time of a token, bytes of a token.

    python -m bench.kv_int8 [PACK] [--tokens 1024] [--seeds 2] [--text FILE] [--out FILE]

Teacher-forced over a text's tokens (the pack's tokenizer) or random ones; without PACK over random checkpoints of the
demo shape with f32 experts. Beside int8 stands what another cut of the same windows gives with exact keys and values:
so much moves anyway. Times are ratios of single-row windows that take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.checkpoint import PRESETS, write_checkpoint
from bench.quality import Divergence, FileRecords
from bench.result import frame, write
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.models.load import Model
from lanes.state.pool import StatePool
from lanes.state.shape import StateShape
from lanes.window import Window
from shared_experts.convert import convert
from shared_experts.pack import Pack

CHUNKS = (256, 192)  # of windows; the second is the other cut
TIMED = 60


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[Model]:
    """A pack's model, its experts read where they lie in the file."""
    with Pack.open(folder) as pack:
        info, counters = pack.manifest.experts, Counters()
        kernel = ExpertKernel(info.layout, threads=torch.get_num_threads())
        yield load_model(
            pack, ExpertStore(kernel, ExpertCache(FileRecords(pack), info, 0, adaptive, counters), counters)
        )
        kernel.close()


def read(model: Model, shape: StateShape, ids: list[int], chunk: int) -> tuple[torch.Tensor, StatePool]:
    """Teacher-forced logits [T, V], and the states with room for more."""
    room = len(ids) + TIMED
    pool = StatePool(shape, shape.bytes(room))
    slot = pool.open(room)
    windows = [(at, ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    parts = [model.forward(Window.of_sequence(some, at, slot, logits="all"), pool) for at, some in windows]
    return torch.cat(parts), pool


def token_ratio(model: Model, pools: tuple[StatePool, StatePool], start: int) -> float:
    """Time of a token with the second states over the first's, median of windows that take turns."""
    ratios = []
    for at in range(start, start + TIMED):
        times = []
        for pool in pools:
            began = time.perf_counter()
            model.forward(Window.of_sequence([at % 97 + 10], at, 0), pool)
            times.append(time.perf_counter() - began)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def compare(model: Model, ids: list[int], found: dict[str, Divergence]) -> float:
    """Adds one text; returns the ratio of times."""
    exact = model.state_shape
    truth, pool = read(model, exact, ids, CHUNKS[0])
    coded, coded_pool = read(model, exact.with_int8(), ids, CHUNKS[0])
    found["int8"].add(truth, coded)
    found["another cut"].add(truth, read(model, exact, ids, CHUNKS[1])[0])
    return token_ratio(model, (pool, coded_pool), len(ids))


def main() -> None:
    """Measures and writes one result."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_int8", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found, ratios, tokens_read = {"int8": Divergence(), "another cut": Divergence()}, [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(chosen.seeds):
            pack = chosen.pack
            if pack is None:
                source = write_checkpoint(Path(scratch) / f"{seed}", PRESETS["demo"], seed, tokenizer=False, mtp=False)
                pack = Path(scratch) / f"{seed}.pack"
                convert(source, pack, experts="f32", dense="f32", threads=1)
            with loaded(pack) as model:
                vocabulary = model.spec.vocab
                if chosen.text is None:
                    ids = np.random.default_rng(seed).integers(10, vocabulary, chosen.tokens).tolist()
                else:
                    every = Tokenizer.from_file(str(pack / "tokenizer.json")).encode(chosen.text.read_text()).ids
                    ids = every[seed * chosen.tokens : (seed + 1) * chosen.tokens]
                ratios.append(compare(model, ids, found))
                tokens_read += len(ids)
                shape = model.state_shape
    per_token = {name: s.growing_bytes(4096) / 4096 for name, s in (("exact", shape), ("int8", shape.with_int8()))}
    result = frame(
        "bench.kv_int8",
        [
            *([str(chosen.pack.name)] if chosen.pack else []),
            "--tokens",
            str(chosen.tokens),
            "--seeds",
            str(chosen.seeds),
        ],
        pack={"name": chosen.pack.name if chosen.pack else "random checkpoints of the demo shape, f32 experts"},
        conditions={
            "tokens": tokens_read,
            "text": "random ids" if chosen.text is None else chosen.text.name,
            "threads": 1,
        },
        packages=("torch", "numpy"),
    )
    answers = {name: divergence.summary() for name, divergence in found.items()}
    figures = {"answers": answers, "token_time_ratio": round(statistics.median(ratios), 3), "bytes_a_token": per_token}
    write({**result, **figures}, chosen.out)


if __name__ == "__main__":
    main()
