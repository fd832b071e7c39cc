"""What a grammar costs a lane: its first use, and the mask and the draw of each token.

    python -m bench.grammar_masks [--vocab 32768] [--tokens 400]

Prints one JSON object. Masks are made for a vocabulary of the tokenizer's size; the row is random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.tokenizer import write_tokenizer
from lanes.grammar import Grammar, Grammars

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "number"}}},
}


def measure(vocab: int, tokens: int) -> dict[str, object]:
    """Milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab)
        grammars = Grammars(Path(folder) / "tokenizer.json", vocab, (2,))

        def compile_it(text: str) -> Grammar:
            grammar = grammars.begin(text, (), (2,)).result()
            assert grammar is not None, "nobody stops it"
            return grammar

        began = time.perf_counter()
        compile_it('start: "a"')
        first = time.perf_counter() - began
        began = time.perf_counter()
        grammar = compile_it(f"start: %json {json.dumps(SCHEMA)}")
        compiled = time.perf_counter() - began
        rng = np.random.default_rng(0)
        row = rng.standard_normal(vocab).astype(np.float32)
        times = []
        for _ in range(tokens):
            row = np.roll(row, 1)
            began = time.perf_counter()
            token = int(np.argmax(grammar.row(row, row)))
            grammar.add(token)
            times.append(time.perf_counter() - began)
            if token == 2:
                grammar = compile_it(f"start: %json {json.dumps(SCHEMA)}")
    return {
        "vocab": vocab,
        "load": os.getloadavg()[0],
        "tokenizer_ms": round(first * 1e3, 1),
        "compile_ms": round(compiled * 1e3, 2),
        "token_ms_median": round(statistics.median(times) * 1e3, 3),
        "token_ms_p99": round(sorted(times)[int(len(times) * 0.99)] * 1e3, 3),
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    print(json.dumps(measure(options.vocab, options.tokens)))


if __name__ == "__main__":
    main()
