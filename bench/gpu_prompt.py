"""The dense blocks of a prompt's chunk on the GPU that is there, with kernels of their own and without: values, time.

One attention and one DeltaNet layer of the true shape with random weights, at several places of a long sequence.
"Without" is what runs on any device, the twin; results must agree within the tolerance of bf16 (2e-2 of scale). Times
are of whole blocks, products and host included; with --kernels also what the device did. Not here: experts
(bench.gpu_prefill).

    python -m bench.gpu_prompt --kernels --out bench/results/gpu_prompt.json

Needs torch with CUDA, triton and numpy.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from bench import bare_host, result
from bench.synthetic.shape import SHAPES
from lanes.kernels import delta_chunks, prompt_attention
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.gpu.prompt import kernels_of
from lanes.models.qwen4_exp.rows import Rotary, Rows, prepare
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import SequenceState
from lanes.window import Window

TOLERANCE = 2e-2
STEPS = [
    (16 << 10, 3, 4),
    (16 << 10, 2, 4),
    (32 << 10, 3, 4),
    (32 << 10, 2, 4),
    (32 << 10, 2, 8),
]  # bytes, stages, warps

DELTA = [(32, 4, 32), (16, 4, 32), (16, 4, 64), (32, 8, 32), (64, 8, 32), (32, 4, 16)]  # columns, warps, parts


class Drawn:
    """Stands in for `Weights`: random tensors, their scale that of a product that keeps its input's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def under(self, scope: str) -> Drawn:
        """The same."""
        return self

    def matrix(
        self, *parts: tuple[str, int], columns: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:  # fmt: skip
        """bf16, but where another type is asked for."""
        out = torch.empty((sum(rows for _, rows in parts), columns), device=self._device).normal_()
        return out.mul_(columns**-0.5).to(dtype or torch.bfloat16)

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """fp32."""
        return torch.empty(shape, device=self._device).normal_().mul_(0.3)


class Bench:
    """Cases, one after another; what fails is reported, and the others go on."""

    def __init__(self, rows: int, most_tokens: int, repeats: int, *, kernels: bool) -> None:
        self.device = torch.device("cuda", 0)
        text = SHAPES["true"].changed(layers=4, ngram=False).config.text_config(mtp=False)
        self.spec = Spec.from_config(text)
        self.rotary = Rotary(self.spec.rotary_dim, self.spec.rope_theta, self.device)
        self.rows, self._repeats, self._kernels = rows, repeats, kernels
        self.state = SequenceState(self.spec.state_shape(torch.bfloat16), most_tokens, device=self.device)
        self.state.reserve(most_tokens)
        self.u = torch.randn(rows, self.spec.hidden, device=self.device)
        self.cases: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def at(self, start: int) -> Rows:
        """The chunk at a place."""
        self.state.length = start
        return prepare(Window.of_sequence([0] * self.rows, start, 0), {0: self.state}, self.spec, self.rotary)

    def run(self, name: str, block: Attention | DeltaNet, start: int) -> None:
        """With and without."""
        try:
            rows = self.at(start)
            want = self._once(block, rows)
            plain_ms = self._milliseconds(lambda: self._once(block, rows))
            with_kernels = kernels_of(self.spec)
            with_kernels.give(block)
            got = self._once(block, rows)
            differs = float((got - want).abs().max() / want.abs().max())
            assert differs <= TOLERANCE, f"{differs:.4f} of scale"
            took_ms = self._milliseconds(lambda: self._once(block, rows))
            told = self._device_work(lambda: self._once(block, rows)) if self._kernels else {}
            with_kernels.take(block)
        except Exception as error:
            self.failed.append(name)
            print(f"{name:<40} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=-3)
            torch.cuda.synchronize()
            return
        self.cases.append({
            "name": name, "rows": self.rows, "start": start, "ms": round(took_ms, 3), "plain_ms": round(plain_ms, 3),
            "differs": differs, "device_us": told,
        })  # fmt: skip
        print(
            f"{name:<40} {took_ms:8.2f} ms, without {plain_ms:8.2f} ms; differs by {differs:.5f} of scale", flush=True
        )
        for kernel, took_us in told.items():
            print(f"    {took_us / 1e3:8.3f} ms  {kernel[:100]}", flush=True)

    def sweep(self, start: int) -> None:
        """Steps, stages and warps of the attention kernel alone."""
        spec, state = self.spec, self.state.attention[self.spec.attention_layers[0]]
        reader = kernels_of(spec).reader
        q = torch.randn(self.rows, spec.heads, spec.head_dim, device=self.device)
        index_q = torch.randn(self.rows, spec.index_heads, spec.index_dim, device=self.device)
        kept = prompt_attention.STEP_BYTES, prompt_attention.STAGES, prompt_attention.WARPS
        dense = min(spec.dense_rows(start), self.rows)
        chosen = reader.chosen(index_q[dense:], start + dense, state)
        queries, out = q.bfloat16(), torch.empty_like(q, dtype=torch.bfloat16)
        choose_ms = self._milliseconds(lambda: reader.chosen(index_q[dense:], start + dense, state))
        print(f"choose, from {start}: {choose_ms:.2f} ms", flush=True)
        for tried in STEPS:
            prompt_attention.STEP_BYTES, prompt_attention.STAGES, prompt_attention.WARPS = tried
            try:
                ms = self._milliseconds(
                    lambda: prompt_attention.attend(
                        reader.shape, queries, chosen, start, state.keys, state.values, q, out
                    )
                )
                step = f"step {tried[0] >> 10} KiB, {tried[1]} stages, {tried[2]} warps"
                print(f"attend, from {start}: {step}: {ms:.2f} ms", flush=True)
                self.cases.append({"name": "attend", "start": start, "tried": tried, "ms": round(ms, 3)})
            except Exception as error:
                self.failed.append(f"sweep {tried}")
                print(f"attend, {tried}: FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
        prompt_attention.STEP_BYTES, prompt_attention.STAGES, prompt_attention.WARPS = kept

    def sweep_delta(self) -> None:
        """Columns, warps and parts of the delta rule's last launch, in the whole rule."""
        spec, draw = self.spec, functools.partial(torch.randn, device=self.device)
        q, k = (
            torch.nn.functional.normalize(draw(self.rows, spec.value_heads, spec.key_dim), dim=-1) for _ in range(2)
        )
        v, g = (
            draw(self.rows, spec.value_heads, spec.value_dim),
            -torch.rand(self.rows, spec.value_heads, device=self.device),
        )
        state = draw(spec.value_heads, spec.key_dim, spec.value_dim)
        kept = delta_chunks.COLUMNS, delta_chunks.WARPS, delta_chunks.PARTS
        for tried in DELTA:
            delta_chunks.COLUMNS, delta_chunks.WARPS, delta_chunks.PARTS = tried
            name = "delta rule, {} columns, {} warps, parts of {}".format(*tried)
            try:
                ms = self._milliseconds(lambda: delta_chunks.delta_rule(state, q, k, v, g, -g))
                print(f"{name}: {ms:.2f} ms", flush=True)
                self.cases.append({"name": "delta rule", "tried": tried, "ms": round(ms, 3)})
            except Exception as error:
                self.failed.append(name)
                print(f"{name}: FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
        delta_chunks.COLUMNS, delta_chunks.WARPS, delta_chunks.PARTS = kept

    def _once(self, block: Attention | DeltaNet, rows: Rows) -> torch.Tensor:
        for recurrent in self.state.recurrent.values():
            recurrent.matrix.zero_()
            recurrent.conv.zero_()
        with torch.no_grad():
            return block(self.u, rows)

    def _milliseconds(self, call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(self._repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3

    def _device_work(self, call: Callable[[], object]) -> dict[str, float]:
        """Microseconds of the kernels that took most."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        took = {each.key: float(each.device_time_total) for each in profile.key_averages()}
        return dict(sorted(took.items(), key=lambda item: -item[1])[:14])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_prompt", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192, help="of the chunk (default: %(default)s)")
    parser.add_argument("--starts", default="0,24576", help="places of the chunk (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="medians of so many (default: %(default)s)")
    parser.add_argument("--kernels", action="store_true", help="also what the device did")
    parser.add_argument("--limit-s", type=float, default=300.0, help="ends then, whatever hangs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_prompt: no CUDA device\n")
    torch.manual_seed(0)
    starts = [int(word) for word in options.starts.split(",")]
    bench = Bench(options.rows, max(starts) + options.rows, options.repeats, kernels=options.kernels)
    for kept in bench.state.attention.values():
        for tensor in (kept.keys, kept.values, kept.raw_index_keys, kept.block_keys):
            tensor.normal_()
    weights = cast(Weights, Drawn(bench.device))
    attention = Attention(bench.spec, weights, bench.spec.attention_layers[0])
    for start in starts:
        bench.run(f"attention, from {start}", attention, start)
        bench.sweep(start)
    bench.run("DeltaNet", DeltaNet(bench.spec, weights, bench.spec.deltanet_layers[0]), 0)
    bench.sweep_delta()
    if options.out is not None:
        frame = result.frame(
            "bench.gpu_prompt", [], pack={"shape": "true", "layers": 1},
            conditions={"gpu": torch.cuda.get_device_name(0), "rows": options.rows}, packages=("torch", "triton"),
        )  # fmt: skip
        options.out.write_text(json.dumps({**frame, "cases": bench.cases, "failed": bench.failed}, indent=1) + "\n")
    print(f"{len(bench.failed)} failed {bench.failed}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
