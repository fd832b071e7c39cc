"""The n-gram table of a synthetic model: `ngram.bin` with random rows, laid out as a pack's.

Not here: the layer's weights (`dense`). Invariant: the bytes depend on shape and seed only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.synthetic.noise import Noise, runs
from shared_experts.floats import load_floats
from shared_experts.manifest import NgramInfo, ngram_pages
from shared_experts.qwen4_exp import TextConfig


def write(path: Path, text: TextConfig, noise: Noise) -> tuple[NgramInfo, ...]:
    """Writes the file and says what is in it; no layers, no file."""
    tables: list[NgramInfo] = []
    offset = 0
    for layer in text.ple_layers:
        constants = text.ngram_constants(layer)
        row_bytes, rows_per_page, page_bytes = ngram_pages(text.ngram_columns, "bf16")
        table = NgramInfo(
            layer, text.ngram_rows(constants), text.ngram_columns, "bf16", offset, row_bytes, rows_per_page, page_bytes,
            constants.multipliers, constants.head_offsets, constants.head_vocab_sizes,
        )  # fmt: skip
        with path.open("ab") as file:
            per_page = rows_per_page * table.columns
            for number, first, end in runs(table.table_bytes // page_bytes, per_page):
                values = noise.unit(f"ngram {layer}", number, (end - first) * per_page)
                pages = np.zeros((end - first, page_bytes // 2), np.uint16)
                pages[:, :per_page] = load_floats().to_bf16(values).reshape(-1, per_page)
                file.write(pages.data)
        tables.append(table)
        offset += table.table_bytes
    return tuple(tables)
