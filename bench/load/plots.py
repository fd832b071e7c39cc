"""Plots of a report, with matplotlib (the extra `bench`): tokens over time by lane, latencies, scaling.

Not here: figures. Invariant: the shaded window is the one that the aggregate counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_plots(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """PNG files in `folder`; their paths. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    written = []
    for name, run in result["runs"].items():
        figure = Figure(figsize=(9, 6), layout="constrained")
        over_time, first, gaps = figure.subplot_mosaic([["time", "time"], ["first", "gaps"]]).values()
        for lane, tokens in tokens_by_second(run["rows"]).items():
            over_time.plot(range(len(tokens)), tokens, drawstyle="steps-post", label=lane)
        total = run["figures"]["aggregate"]
        if total:
            begin = total["window_begins_s"]
            over_time.axvspan(begin, begin + total["window_s"], alpha=0.15, label="window")
            over_time.legend(loc="lower right")
        over_time.set(title=f"{result['server']['model']}, {name}", xlabel="s", ylabel="tokens/s", ylim=(0, None))
        for axes, values, label in (
            (first, [row["ttft_s"] for row in run["rows"] if row["ttft_s"]], "time to first token, s"),
            (gaps, [row["gap_s"] for row in run["rows"] if row["gap_s"]], "mean time between tokens, s"),
        ):
            if values:
                axes.ecdf(values)
            axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
        written.append(folder / f"{name.replace(' ', '-').replace('+', 'plus-')}.png")
        figure.savefig(written[-1], dpi=110)
    if efficiency := result.get("scaling_efficiency"):
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.bar(list(efficiency), list(efficiency.values()))
        axes.set(title="scaling against the solo rate", ylim=(0, 1.1))
        written.append(folder / "scaling.png")
        figure.savefig(written[-1], dpi=110)
    return written


def tokens_by_second(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Tokens of each lane in each second since the first request."""
    last = max((at for row in rows for at, _ in row["arrivals_s"]), default=0.0)
    lanes: dict[str, list[int]] = {}
    for row in rows:
        seconds = lanes.setdefault(row["lane"], [0] * (int(last) + 1)) if row["arrivals_s"] else []
        for at, tokens in row["arrivals_s"]:
            seconds[int(at)] += tokens
    return dict(sorted(lanes.items()))
