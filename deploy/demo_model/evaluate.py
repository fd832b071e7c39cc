"""`python -m deploy.demo_model.evaluate CHECKPOINT DATA`: what the model knows, and what each approximation costs.

On held-out packages, teacher-forced, in fp32: bits per byte of code and prose with exact experts and with the codes of
q8 and q4g64 packs; without the n-gram table; over what the indexer selects of 4,096 tokens; by position; and the share
of greedy drafts that the model itself would have written. Codes are those of `shared_experts.codecs`, activations
exact: a lane's kernel also rounds activations (`served`). Not here: routing (`routing`).

Letters: B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deploy.demo_model import export
from deploy.demo_model.data import tokens
from deploy.demo_model.model.attention import Reading
from deploy.demo_model.model.network import How, Network
from deploy.demo_model.tokenizer import bytes_of_tokens
from shared_experts import codecs

DRAFT_STEPS = 3
GROUP = 64
FORMATS = ("q8", "q4g64")
SHORT_TOKENS, LONG_TOKENS = 4096, 32768
BUDGETS = (256, 512, None)


@dataclass(slots=True)
class Text:
    """A held-out stream and the bytes that each of its tokens stands for."""

    ids: torch.Tensor  # int64 [N]
    sizes: torch.Tensor  # fp32 [N]

    @classmethod
    def read(cls, data: Path, kind: str, device: str) -> Text:
        """The stream of one kind of documents."""
        ids = tokens.read(data / f"{kind}{tokens.SUFFIX}").astype(np.int64)
        sizes = np.array(bytes_of_tokens(data / "tokenizer.json"), np.float32)[ids]
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(sizes).to(device))

    def windows(self, length: int, most: int) -> list[slice]:
        """Up to `most` windows of `length` tokens, spread evenly."""
        if not most:
            return []
        count = self.ids.shape[0] // length
        step = max(1, count // most)
        return [slice(i * length, (i + 1) * length) for i in range(0, count, step)][:most]


@torch.no_grad()
def nats(network: Network, text: Text, windows: Sequence[slice], how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """Surprise fp64 [windows, T - 1] of each next token, and the bytes of those tokens."""
    found, sizes = [], []
    for window in windows:
        ids = text.ids[window][None]
        logits = network.logits(network(ids[:, :-1], how).x).float()
        found.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none").double())
        sizes.append(text.sizes[window][1:].double())
    return torch.stack(found), torch.stack(sizes)


def bits_per_byte(network: Network, text: Text, windows: Sequence[slice], how: How) -> float:
    """The figure of a stream."""
    found, sizes = nats(network, text, windows, how)
    return round(float(found.sum() / sizes.sum() / math.log(2)), 4)


def by_position(network: Network, text: Text, windows: Sequence[slice], how: How) -> dict[str, float]:
    """Bits per byte in ranges of positions that double."""
    found, sizes = nats(network, text, windows, how)
    result, first = {}, 0
    length = found.shape[1]
    while first < length:
        end = min(max(2 * first, 512), length)
        end = length if length - end < end // 2 else end
        part = slice(first, end)
        result[f"{first}-{end}"] = round(float(found[:, part].sum() / sizes[:, part].sum() / math.log(2)), 4)
        first = end
    return result


@torch.no_grad()
def drafts(network: Network, text: Text, windows: Sequence[slice], how: How) -> dict[str, object]:
    """Share of greedy drafts, after true tokens, that the model itself would have written there.

    `accepted[d]`: of draft d + 1 where all before it were accepted. `tokens_per_pass[d]`: with d + 1 drafts, the
    model's own token included.
    """
    alive = torch.zeros(DRAFT_STEPS + 1, dtype=torch.float64)
    for window in windows:
        ids = text.ids[window][None]
        length = ids.shape[1] - DRAFT_STEPS
        x = network(ids, how).x
        own = network.logits(x).argmax(-1)  # own[:, t] follows ids[:, t]
        kept = torch.ones(1, length, dtype=torch.bool, device=ids.device)
        alive[0] += length
        for step, passed in enumerate(network.draft(x[:, :length], ids, DRAFT_STEPS, how), 1):
            kept &= network.draft_logits(passed.x).argmax(-1) == own[:, step : step + length]
            alive[step] += float(kept.sum())
    shares = alive / alive[0]
    return {
        "accepted": [round(float(shares[d + 1] / shares[d].clamp_min(1e-9)), 4) for d in range(DRAFT_STEPS)],
        "tokens_per_pass": [round(float(shares[: d + 2].sum()), 3) for d in range(DRAFT_STEPS)],
    }


def with_codes(network: Network, name: str) -> Network:
    """A copy whose experts are what a pack of format `name` holds, the draft layer's too."""
    network = copy.deepcopy(network)
    for layer in (*network.model.layers, *network.mtp.layers):
        for weights in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            rows = weights.detach().cpu().numpy().reshape(-1, weights.shape[-1])
            if name == "q8":
                back = codecs.dequantise_q8(*codecs.quantise_q8(rows, GROUP), GROUP)
            else:
                back = codecs.dequantise_q4(*codecs.quantise_q4(rows, GROUP), GROUP)
            weights.data.copy_(torch.from_numpy(back).view(weights.shape))
    return network


def evaluate(network: Network, data: Path, device: str, windows: int, long_windows: int) -> dict[str, object]:
    """Every table."""
    texts = {kind: Text.read(data, kind, device) for kind in ("code", "prose")}
    short = {kind: text.windows(SHORT_TOKENS, windows) for kind, text in texts.items()}
    budget = network.config.indexer_budget
    as_served = How(Reading(budget))

    def row(model: Network, how: How) -> dict[str, float]:
        print(".", end="", file=sys.stderr, flush=True)  # minutes each, on a CPU
        return {kind: bits_per_byte(model, text, short[kind], how) for kind, text in texts.items()}

    result: dict[str, object] = {"windows": {kind: len(found) for kind, found in short.items()}, "tokens": SHORT_TOKENS}
    result["exact experts"] = row(network, as_served)
    for name in FORMATS:
        result[name] = row(with_codes(network, name), as_served)
    result["no n-gram table"] = row(network, How(Reading(budget), ngrams=False))
    for choice in BUDGETS:
        result[f"indexer budget {choice or 'all'}"] = row(network, How(Reading(choice)))
    long = {kind: text.windows(LONG_TOKENS, long_windows) for kind, text in texts.items()}
    result["by position"] = {
        kind: by_position(network, text, long[kind], as_served) for kind, text in texts.items() if long[kind]
    }
    result["drafts"] = {kind: drafts(network, text, short[kind], as_served) for kind, text in texts.items()}
    return result


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo_model.evaluate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--windows", type=int, default=32, help="of 4,096 tokens for each kind of text (default: 32)")
    parser.add_argument("--long-windows", type=int, default=8, help="of 32,768 tokens (default: 8)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    network = export.read_network(options.checkpoint).to(options.device).eval()
    result = evaluate(network, options.data, options.device, options.windows, options.long_windows)
    result["checkpoint_sha256"] = export.digest(options.checkpoint / export.WEIGHTS)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
