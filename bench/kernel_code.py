"""Compiles a GPU lane's kernels for sm_90 without a GPU, at the true sizes, and counts what their code is made of.

Registers decide how many programs a multiprocessor holds; 16-byte loads, barriers and spills say what the compiler made
of a kernel. Not here: time (a GPU is needed for that).

    python -m bench.kernel_code --rows 1,4

Kernels compiled here lie in Triton's cache afterwards: with `--processes`, a host compiles those of the true sizes in
seconds, before the first start of a lane or a bench does so one after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lanes.kernels import (
    attention,
    combine,
    delta_chunks,
    delta_step,
    deltanet,
    doorbell,
    experts,
    fetch,
    grouped,
    index,
    jobs,
    mixing,
    ngram,
    normed,
    places,
    post,
    products,
    prompt_attention,
    prompt_delta,
    prompt_route,
    prompt_stream,
    route,
    sampling,
    shared,
    stream,
)
from lanes.kernels.ahead import Ahead
from lanes.kernels.rows import Jobs, QuantisedRows
from shared_experts.layout import EXPERT_FORMATS, RecordLayout

HIDDEN, INNER, CHOSEN, EXPERTS = 2560, 640, 10, 512
COUNTED = {
    "loads_16_bytes": r"LDG\.E[.\w]*\.128", "loads": "LDG", "spills": "LDL|STL", "barriers": r"BAR\.SYNC",
    "shared_stores": "STS", "shuffles": "SHFL", "integer_dots": "IDP",
    "tensor_core_dots": "IMMA|IGMMA|HMMA|HGMMA",
}  # fmt: skip


class _Device:
    """What Triton asks of a driver while it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(call: Any, look: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Figures of every kernel that `call` would launch, or what `look` finds; nothing runs."""
    driver.set_active(_Device())
    found: dict[str, Any] = {}
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__.strip("_")] = (look or figures)(kernel)
        return kernel

    JITFunction.run = only_compile
    try:
        call()
    finally:
        JITFunction.run = run
    return found


def figures(kernel: Any) -> dict[str, int]:
    """Counts over one kernel's machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.findall(name + r":(\d+)", usage)[0]) for name in ("REG", "STACK"))
    inexact = len(
        re.findall(r"\.approx|\.full|\.ftz|(?:mul|add|sub)\.f32", kernel.asm["ptx"])
    )  # may be rounded otherwise
    counts = {name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()}
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "inexact": inexact,
        **counts,
    }


def launch_experts(format: str, rows: int) -> None:
    """One layer's routed experts of a window of `rows`, at the true sizes."""
    layout = RecordLayout.of(EXPERT_FORMATS[format], HIDDEN, INNER)
    pairs = rows * CHOSEN
    x, y, h = torch.empty(rows, HIDDEN), torch.empty(pairs, HIDDEN), torch.empty(pairs, INNER)
    group = layout.format.group
    quantised, work = QuantisedRows.room(rows, HIDDEN, group), Jobs.room(rows, CHOSEN)
    addresses = torch.empty(EXPERTS, dtype=torch.int64)
    experts.quantise_rows(x, quantised, layout.format.group)
    word = doorbell.Word(torch.empty(1, dtype=torch.int64), 1)
    ahead = None
    if rows == 1:
        ahead = Ahead(torch.empty((1, 2), dtype=torch.int64), torch.empty(EXPERTS, dtype=torch.int8))
    experts.gate_up(layout, addresses, work, quantised, h, word, ahead)
    between = QuantisedRows.room(pairs, INNER, group)
    experts.quantise_rows(h, between, layout.format.group, opens=True)
    experts.down(layout, addresses, work, between, y, word)
    routed = route.Routed(
        torch.empty((rows, CHOSEN), dtype=torch.int32), torch.empty(rows, CHOSEN), work,
        torch.empty(pairs, dtype=torch.int32),
    )  # fmt: skip
    counts = torch.empty(EXPERTS, dtype=torch.int32)
    slots = torch.empty(pairs, dtype=torch.int32)
    combine.combine(torch.empty(rows, CHOSEN), y, y, slots, x)
    jobs.jobs(routed.ids, counts.to(torch.int8), counts, work, slots)
    inputs = post.Inputs(counts, counts, torch.empty(rows, HIDDEN))
    post.post(x, routed.ids, routed.slots, quantised, layout.format.group, counts, 0, inputs)
    posted = post.Post(x, quantised, layout.format.group, counts, 0, inputs)
    route.route(torch.empty(rows, EXPERTS + 1), counts.to(torch.int8), counts, routed, normalise=True, posted=posted)


def launch_grouped(format: str, rows: int) -> None:
    """One layer's routed experts of a prompt's chunk of `rows`, at the true sizes."""
    grouped_of(RecordLayout.of(EXPERT_FORMATS[format], HIDDEN, INNER), EXPERTS, CHOSEN, rows)


def grouped_of(layout: RecordLayout, count: int, chosen: int, rows: int) -> None:
    """The same of `count` experts of any sizes."""
    pairs, hidden = rows * chosen, layout.hidden
    x = QuantisedRows.room(rows, hidden, layout.format.group)
    addresses, none = torch.empty(count, dtype=torch.int64), np.zeros(1, np.int64)
    asked = grouped.ask(torch.zeros((rows, chosen), dtype=torch.int32), count)
    groups = places.Groups(asked.pair, asked.place, asked.tiles, asked.tile_rows, none, none)
    experts.quantise_rows(torch.empty(rows, hidden), x, layout.format.group)
    grouped.run(
        layout, addresses, groups, places.Batch(0, len(asked.tiles), 0, pairs), x, torch.empty(rows, chosen),
        grouped.Scratch.of(layout, pairs, count, "cpu"), torch.empty(rows, hidden),
    )  # fmt: skip


def launch_dense(rows: int) -> None:
    """The kernels between matrix products, once each, at the true sizes."""
    shape = deltanet.DeltaShape(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4)
    channels, values = shape.channels, shape.value_heads
    pending, replay = (
        deltanet.DeltaRows(torch.empty(4, channels), torch.empty(4, values), torch.empty(4, values)) for _ in range(2)
    )
    accepted, out = torch.empty(1, dtype=torch.int32), torch.empty(rows, values, 128)
    deltanet.prepare(
        shape, torch.empty(rows, channels), torch.empty(rows, 2 * values), torch.empty(4, channels),
        torch.empty(values), torch.empty(values), torch.empty(3, channels), accepted, torch.empty(4, channels),
        pending, replay,
    )  # fmt: skip
    deltanet.rule(shape, torch.empty(values, 128, 128), accepted, replay, pending, out)
    if rows <= products.FEW_ROWS:
        delta_step.step(
            shape, torch.empty(rows, channels + values * 128), torch.empty(rows, 2 * values), torch.empty(4, channels),
            torch.empty(values), torch.empty(values), torch.empty(128), 1e-6, torch.empty(3, channels), accepted,
            torch.empty(4, channels), pending, torch.empty(values, 128, 128), torch.empty(16, dtype=torch.int32),
            torch.empty(rows, values * 128).bfloat16(), silu=True,
        )  # fmt: skip
    wide = torch.empty(rows, values * 128)
    deltanet.finish(out, wide, torch.empty(128), wide.bfloat16(), 1e-6, silu=True)
    streams, u = torch.empty(rows, 4, HIDDEN), torch.empty(rows, HIDDEN)
    stream.enter(streams, u, torch.empty(rows, 4), torch.empty(4, HIDDEN), streams, streams.bfloat16(), 1e-6)
    ids = torch.empty(rows, dtype=torch.int64)
    sampling.greatest(torch.empty(rows, 248_320), torch.empty((rows, 122), dtype=torch.int64), ids)
    logits, sums = torch.empty(rows, 248_320), torch.empty((rows, 2, 122))
    sampling.likeliest(logits, torch.empty((rows, 122), dtype=torch.int64), sums, ids, sums[:, 0, 0])
    norm, tail, last = torch.empty(4, HIDDEN), torch.empty(9, 4 * HIDDEN), torch.empty(4, 4 * HIDDEN)
    normed.normed(streams.flatten(1), norm.flatten(), streams.flatten(1).bfloat16(), 1e-6)
    ngram.settle(tail, last, accepted)
    ngram.gate(streams, torch.empty(rows, 5 * HIDDEN), (norm, norm, norm), last, 1e-6, 1e-6)
    ngram.convolve(streams.flatten(1), tail, last, torch.empty(4, 4 * HIDDEN), 3)
    sampling.uniform(ids, ids, torch.empty(rows, dtype=torch.float64))
    fetch.fetch(torch.empty(48 * EXPERTS, dtype=torch.int64), torch.empty(48 * EXPERTS, dtype=torch.int64))
    fetch.fetch_named(ids[:1], ids, torch.empty((4, HIDDEN), dtype=torch.bfloat16), torch.empty(HIDDEN))


def launch_fused(rows: int) -> None:
    """Products of a layer with what is fused to them, at the true sizes."""

    def matrix(count: int, columns: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty((count, columns), dtype=kind)

    u, streams = torch.empty(rows, HIDDEN), torch.empty(rows, 4, HIDDEN)
    low, injection = torch.empty(rows, 320).bfloat16(), torch.empty(rows, 4)
    stream.lower(streams.bfloat16(), matrix(324, 4 * HIDDEN), low, injection)
    stream.lift(low, matrix(4 * HIDDEN, 320), streams, u, u.bfloat16())
    heads_out = torch.empty(rows, 6144).bfloat16()
    products.product(heads_out, matrix(HIDDEN, 6144), u)
    wide, narrow = torch.empty(rows, 16_384), torch.empty(rows, 96)
    products.two_products(u.bfloat16(), matrix(16_384, HIDDEN), wide, u, matrix(96, HIDDEN, torch.float32), narrow)
    logits, h = torch.empty(rows, EXPERTS + 1), torch.empty(rows, INNER).bfloat16()
    router = matrix(EXPERTS + 1, HIDDEN, torch.float32)
    shared.enter(u, router, logits, u.bfloat16(), matrix(2 * INNER, HIDDEN), h)
    y, slots = torch.empty(rows * CHOSEN, HIDDEN), torch.empty(rows * CHOSEN, dtype=torch.int32)
    leave = (h, matrix(HIDDEN, INNER), logits[:, -1], torch.empty(rows, CHOSEN), y, y, slots)
    if rows > products.FEW_ROWS:
        shared.leave(*leave, u)
        return
    shared.leave(*leave, streams, injection)
    products.product_into(heads_out, matrix(HIDDEN, 6144), injection, streams)


def launch_mixing(rows: int) -> None:
    """A hyper-connection of few rows, at the true sizes."""
    x, u, norm = torch.empty(rows, 4, HIDDEN), torch.empty(rows, HIDDEN), torch.empty(4, HIDDEN)
    low, scale = torch.empty(rows, 4, 324), torch.empty(rows, 4)
    mixing.lower(x, norm, torch.empty((324, 4 * HIDDEN), dtype=torch.bfloat16), low, scale, 1e-6)
    up = torch.empty((4 * HIDDEN, 320), dtype=torch.bfloat16)
    mixing.lift(low, up, x, scale, norm, scale, u, u.bfloat16())


def launch_attention(rows: int) -> None:
    """One layer's attention at the largest context and the true sizes."""
    shape, tokens = attention.AttentionShape(24, 2, 256, 4, 128, 32, 4, 512), 262_144
    cache = torch.empty((2, 1, 256), dtype=torch.bfloat16).expand(2, tokens, 256)
    raw_keys, block_keys = torch.empty((tokens, 128), dtype=torch.bfloat16), torch.empty(tokens // 4, 128)
    kept = attention.Kept(cache, cache, raw_keys, block_keys)
    length, angles = torch.empty(1, dtype=torch.int32), torch.empty(rows, 32)
    projected = torch.empty(rows, shape.columns)
    norms = attention.Norms(*(torch.empty(size) for size in (256, 256, 128, 128)))
    queries = attention.Queries(torch.empty((rows, 24, 256), dtype=torch.bfloat16), torch.empty(rows, 4, 128))
    chosen = index.Chosen.of(rows, tokens // 4, 512, "cpu")
    partial = attention.Partial.of(shape, rows, "cpu")
    attention.prepare(
        shape, projected, length, norms, attention.Angles(angles, angles, angles, angles), 1e-6, queries, kept
    )  # fmt: skip
    index.choose(queries.index, kept.block_keys, length, 4, chosen)
    attention.attend(shape, queries.heads, chosen.ids, length, kept, partial)
    attention.merge(shape, partial, length, attention.gates(shape, projected), queries.heads)


def launch_prompt(rows: int) -> None:
    """What is launched for a prompt's chunk of `rows` beside its experts, at the largest context and the true sizes."""
    shape, tokens = attention.AttentionShape(24, 2, 256, 4, 128, 32, 4, 512), 262_144
    queries = torch.empty((rows, 24, 256), dtype=torch.bfloat16)
    keys = torch.empty((2, tokens, 256), dtype=torch.bfloat16)
    gates = torch.empty(1, 24, 512).expand(rows, 24, 512)[:, :, 256:]
    chosen = torch.empty((rows, 512), dtype=torch.int32)
    prompt_attention.attend(shape, queries, chosen, tokens - rows, keys, keys, gates, queries)
    delta, taps = deltanet.DeltaShape(16, 48, 128, 128, 4), torch.empty((4, 10240))
    projected, mixed, norm = torch.empty((64, 16384)), torch.empty((64, 10240)), torch.empty(128)
    prompt_delta.mix(delta, projected[:, :10240], taps[1:], taps, mixed)
    keys, values, gates = (
        mixed[:, :2048].unflatten(1, (16, 128)),
        mixed[:, 4096:].unflatten(1, (48, 128)),
        taps[:1, :48],
    )
    gates = gates.repeat(64, 1)
    out = delta_chunks.delta_rule(torch.empty((48, 128, 128)), keys, keys, values, gates, gates)
    prompt_delta.finish(out, projected[:, 10240:], norm, torch.empty((64, 6144), dtype=torch.bfloat16), 1e-6, silu=True)
    x, norm, scale = torch.empty((128, 4, HIDDEN)), torch.empty((4, HIDDEN)), torch.empty((128, 4))
    rounded, squashed = (torch.empty((128, n), dtype=torch.bfloat16) for n in (4 * HIDDEN, 320))
    result = torch.empty((128, HIDDEN))
    for owed in (None, (scale, result)):
        prompt_stream.enter(x, owed, norm, rounded.view(x.shape), scale, 1e-6)
    prompt_stream.squash(torch.empty((128, 324)), squashed, scale)
    up = torch.empty((4 * HIDDEN, 320), dtype=torch.bfloat16)
    prompt_stream.lift(squashed, up, x, scale, norm, result)
    scores, ids = torch.empty((64, EXPERTS + 1)), torch.empty((64, CHOSEN), dtype=torch.int32)
    prompt_route.route(scores[:, :-1], ids, torch.empty((64, CHOSEN)), normalise=True)
    index.choose_rows(torch.empty((4, 4, tokens // 4)), tokens - 4, 4, 512, 128, tokens // 4)


def compiled_by(launch: Callable[..., None], given: tuple[Any, ...]) -> dict[str, dict[str, int]]:
    """`compiled`, as another process can be asked for it."""
    return compiled(lambda: launch(*given))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_code", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1", help="rows of the window, comma-separated (default: %(default)s)")
    parser.add_argument("--formats", default="q4g64", help="expert formats (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that compile side by side (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=0, help="rows of a prompt's chunk, for the grouped kernels")
    options = parser.parse_args(argv)
    windows = [int(rows) for rows in options.rows.split(",") if rows]
    formats = options.formats.split(",")
    tasks: list[tuple[str, Callable[..., None], tuple[Any, ...]]]
    tasks = [(f"{format}, {rows} rows", launch_experts, (format, rows)) for format in formats for rows in windows]
    tasks += [(f"{format}, chunk", launch_grouped, (format, options.chunk)) for format in formats if options.chunk]
    tasks += [("prompt", launch_prompt, (options.chunk,))] if options.chunk else []
    for rows in windows:
        tasks += [(f"{launch.__name__.removeprefix('launch_')}, {rows} rows", launch, (rows,))
                  for launch in (launch_dense, launch_fused, launch_attention)]  # fmt: skip
        tasks += [(f"mixing, {rows} rows", launch_mixing, (rows,))] if rows <= products.FEW_ROWS else []
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
            found = [pool.submit(compiled_by, launch, given) for _, launch, given in tasks]
            result = {name: one.result() for (name, _, _), one in zip(tasks, found, strict=True)}
    else:
        result = {name: compiled_by(launch, given) for name, launch, given in tasks}
    json.dump({"triton": triton.__version__, "target": "sm_90", "kernels": result}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
