"""`python -m lanes --golden PACK`: the golden record of a pack on standard output. Makes no region and no socket.

Experts are read where they lie in the pack's file. Logits of quantised models move when another machine rounds a last
bit otherwise: a rounding or a router's choice that stands on an edge falls the other way. So the record says how far
this model's logits move when a prompt is cut into other windows, which shifts the same last bits, and asks the prompt
that moved least. Not here: who keeps the record (`shared_experts.golden`) or compares it (`selftest`).

Invariant: standard output has a whole record or nothing; exit code 0 exactly with a record.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from lanes import selftest
from lanes.counters import Counters
from lanes.errors import EXIT_START, LaneError, StartError
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from lanes.logs import configure_logging
from lanes.models import load_model
from lanes.models.errors import ModelError
from lanes.runner import ModelRunner, Runner
from lanes.state.pool import StatePool
from shared_experts.errors import SharedExpertsError
from shared_experts.golden import ExpertDigest, GoldenRecord, encode
from shared_experts.manifest import ExpertsInfo
from shared_experts.pack import Pack
from shared_experts.program import version

PROMPTS = 4
CUTS = (1, 5)  # rows a window
MOST_SPREAD = 0.25  # of scale; a model that moves farther is not asked: no answer would be wrong
SPARE_BYTES = 1 << 30


class PackRecords:
    """The records in a pack's file, mapped: what a region is to a lane, without anybody who checked it."""

    def __init__(self, path: Path, info: ExpertsInfo) -> None:
        self._info = info
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._base = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)

    def record_address(self, layer: int, expert: int) -> int:
        """Where the record of an expert lies in this process."""
        return self._base + self._offset(layer, expert)

    def record(self, layer: int, expert: int) -> memoryview:
        """The bytes of one record."""
        offset = self._offset(layer, expert)
        return self._view[offset : offset + self._info.record_bytes]

    def _offset(self, layer: int, expert: int) -> int:
        return (layer * self._info.experts + expert) * self._info.record_bytes


def main(folder: str) -> int:
    """Prints the record; returns the exit code."""
    configure_logging(json_lines=False, lane="golden")  # to standard error
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    try:
        with Pack.open(folder) as pack:
            record = make(pack, threads)
    except (LaneError, ModelError, SharedExpertsError) as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return EXIT_START
    except OSError as error:
        print(f"error: {StartError.code}: {error}", file=sys.stderr)
        return EXIT_START
    sys.stdout.buffer.write(encode(record))
    sys.stdout.buffer.flush()
    return 0


def make(pack: Pack, threads: int) -> GoldenRecord:
    """The record of an open pack; raises StartError where this host is too small for it."""
    info = pack.manifest.experts
    check_memory(pack, Path("/proc/meminfo").read_text())
    records = PackRecords(pack.experts_path, info)
    kernel = ExpertKernel(info.layout, threads=threads)
    try:
        counters = Counters()
        store = ExpertStore(kernel, ExpertCache(records, info, 0, adaptive, counters), counters)
        model = load_model(pack, store)
        tokens = selftest.PROMPT_TOKENS + selftest.DECODE_STEPS
        runner = ModelRunner(model, StatePool(model.state_shape, model.state_shape.bytes(tokens)), store)
        experts = selftest.Experts(kernel, info, records.record_address, records.record)
        selftest.check_twin(experts)  # what is recorded is true, not only what this kernel says
        digests = tuple(
            ExpertDigest(layer, expert, selftest.digest(selftest.expert_row(experts, layer, expert)))
            for layer, expert in selftest.chosen_experts(info)
        )
        prompt, rows, spread = stillest(runner, model.spec.vocab)
        return GoldenRecord(
            pack.fingerprint.hex(),
            prompt,
            tuple(selftest.shorten(row) for row in rows) if spread <= MOST_SPREAD else (),
            min(spread, 1.0),
            digests,
            f"expressway {version()}, torch {torch.__version__}, "
            f"{torch.backends.cpu.get_cpu_capability()}, experts {kernel.isa}",
        )
    finally:
        kernel.close()


def stillest(runner: Runner, vocab: int) -> tuple[tuple[int, ...], list[selftest.Row], float]:
    """The prompt that moved least, its logits, and how far the worst of all moved."""
    found = []
    for number in range(PROMPTS):
        prompt = selftest.question(vocab, number)
        rows = selftest.answer(runner, prompt, None)
        forced = [int(row.argmax()) for row in rows]
        moved = max(distance(rows, selftest.answer(runner, prompt, forced, chunk=chunk)) for chunk in CUTS)
        found.append((moved, number, prompt, rows))
    _, _, prompt, rows = min(found, key=lambda one: one[:2])
    return prompt, rows, max(moved for moved, *_ in found)


def distance(rows: list[selftest.Row], others: list[selftest.Row]) -> float:
    """The greatest difference of two answers, of each step's scale."""
    return max(
        float(np.abs(a - b).max()) / max(float(np.abs(a).max()), 1e-30) for a, b in zip(rows, others, strict=True)
    )


def check_memory(pack: Pack, meminfo: str) -> None:
    """Refuses where the dense weights as fp32 would not fit: a conversion's host need not be a lane's."""
    dense = next(section.bytes for section in pack.manifest.sections if section.name == "dense")
    needed = dense * (2 if pack.manifest.dense_dtype == "bf16" else 1) + SPARE_BYTES
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if match and int(match[1]) << 10 < needed:
        raise StartError(f"the model needs {needed >> 20} MiB of memory, {int(match[1]) >> 10} MiB are available")
