"""A report and a comparison as Markdown, for people. Pure: a report in, text out.

Invariant: a figure that does not count (an invalid window) is never shown without its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.compare import Ratio

NAMES = {"ttft_s": "time to first token", "gap_s": "between tokens", "end_to_end_s": "whole request"}


def report(result: Mapping[str, Any]) -> str:
    """All of one report."""
    host, conditions, server = result["host"], result["conditions"], result["server"]
    rates = any(run["figures"]["aggregate"] for run in result["runs"].values())  # none where parts took turns
    lines = [
        f"# {conditions['scenario']}: {conditions['workload']} on {server['model']}",
        "",
        f"`{result['command']}`",
        "",
        f"Host: {host['cpu']}, {host['cpus']} cores, {host['memory_bytes'] / 2**30:.0f} GiB, Linux {host['kernel']}, "
        f"load {conditions['load_average'][0]:g}. Scale {conditions['scale']:g}, seed {conditions['seed']}.",
        *_lanes(server.get("lanes", {})),
        "",
        f"| run |{' tokens/s | window | a lane |' if rates else ''} first token p50 / p95 | between tokens p50 / p95 "
        "| prompt tokens/s | good | errors |",
        f"| --- |{' --- | --- | --- |' if rates else ''} --- | --- | --- | --- | --- |",
        *(_row(name, run["figures"], rates=rates) for name, run in result["runs"].items()),
        "",
    ]
    for name, run in result["runs"].items():
        for reason in (run["figures"]["aggregate"] or {}).get("reasons", ()):
            lines.append(f"- {name}: the window does not count: {reason}")
    if efficiency := result.get("scaling_efficiency"):
        shown = ", ".join(f"{name} {share:.0%}" for name, share in efficiency.items())
        lines += ["", f"Scaling, against the solo rate times the lanes that answered: {shown}."]
    for name, lanes in result.get("idle_lanes", {}).items():
        lines.append(f"- {name}: {', '.join(lanes)} idle")
    if beside := result.get("interference"):
        lines += [
            "",
            "| beside | pairs | victim's time between tokens, against alone | 95 % interval |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| +{n} | {r['pairs']} | {r['ratio']:.2f} × | {r['low']:.2f} to {r['high']:.2f} |"
            for n, r in beside.items()
        ]
    return "\n".join(lines) + "\n"


def comparison(a: str, b: str, ratios: Mapping[str, Sequence[Ratio]]) -> str:
    """Ratios of B to A; below 1 is faster."""
    lines = [f"B ({b}) over A ({a}); below 1 is faster", "", "| run | measure | pairs | ratio | 95 % interval |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for part, found in ratios.items():
        for r in found:
            doubt = "" if r.certain else " (not certain)"
            lines.append(
                f"| {part} | {NAMES[r.measure]} | {r.pairs} | {r.ratio:.3f}{doubt} | {r.low:.3f} to {r.high:.3f} |"
            )
    return "\n".join(lines) + "\n"


def _lanes(lanes: Mapping[str, Any]) -> list[str]:
    """Where a server says which lanes it has."""
    shown = [f"{name} {lane['device']}, cache {lane['cache_bytes'] / 2**30:.2f} GiB" for name, lane in lanes.items()]
    return [f"Lanes: {'; '.join(shown)}."] if shown else []


def _row(name: str, found: Mapping[str, Any], *, rates: bool) -> str:
    errors = ", ".join(f"{code} {count}" for code, count in found["errors"].items()) or "-"
    share = found["goodput"]["share"]
    cells = (
        name, *(_rates(found["aggregate"]) if rates else ()), _two(found["ttft_s"]), _two(found["gap_s"]),
        _one(found["prompt_tokens_per_s"]["p50"]), "-" if share is None else f"{share:.0%}", errors,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _rates(total: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if total is None:
        return "-", "-", "-"
    speed = f"{total['tokens_per_s']:.1f}{'' if total['valid'] else ' (does not count)'}"
    return speed, f"{total['window_s']:.1f} s", ", ".join(f"{rate:.1f}" for rate in total["lanes"].values())


def _two(spread: Mapping[str, Any]) -> str:
    return "-" if spread["p50"] is None else f"{_seconds(spread['p50'])} / {_seconds(spread['p95'])}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
