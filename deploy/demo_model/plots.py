"""`python -m deploy.demo_model.plots LOG EVALUATION OUT`: the training curves and the perplexity by position as PNG.

Needs matplotlib, which the program itself does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def curves(log: Path, out: Path) -> None:
    """Losses over tokens: next token, drafts, held-out code; and the indexer's divergence."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "main" in line]
    tokens_at = {line["step"]: line["tokens"] for line in steps}
    checks = [
        (tokens_at[n["step"]], n["held_out_code_nats"])
        for n in lines
        if n.get("step") in tokens_at and "held_out_code_nats" in n
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, label in (
        ("main", "next token"),
        ("draft1", "1st draft"),
        ("draft2", "2nd draft"),
        ("draft3", "3rd draft"),
    ):
        points = [(line["tokens"] / 1e6, line[name]) for line in steps if name in line]
        left.plot(*zip(*points, strict=True), label=label, linewidth=0.8)
    if checks:
        left.plot([t / 1e6 for t, _ in checks], [v for _, v in checks], "k.", label="held-out code", markersize=4)
    left.set(xlabel="million tokens", ylabel="nats a token", title="Losses")
    left.legend()
    right.plot([line["tokens"] / 1e6 for line in steps], [line["selection"] for line in steps], linewidth=0.8)
    right.set(xlabel="million tokens", ylabel="nats", title="Indexer: divergence from the attention mass", yscale="log")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def positions(evaluation: Path, out: Path) -> None:
    """Bits per byte in ranges of positions."""
    table: dict[str, dict[str, float]] = json.loads(evaluation.read_text())["by position"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for kind, values in table.items():
        axes.plot(list(values), list(values.values()), "o-", label=kind)
    axes.set(xlabel="position in the context", ylabel="bits per byte", title="Held-out text by position")
    axes.tick_params(axis="x", rotation=30)
    axes.legend()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo_model.plots", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("out", type=Path, help="a folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    curves(options.log, options.out / "training.png")
    positions(options.evaluation, options.out / "positions.png")


if __name__ == "__main__":
    main()
