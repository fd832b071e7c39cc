"""`python -m deploy.demo_model.data.prepare ARCHIVES OUT`: from fetched archives to a tokenizer and files of tokens.

Reads every archive that `sources.tsv` names, in its order, and writes into OUT: `train.u16.xz`, held-out `code`,
`prose` and `chat` files, the tokenizer's three files and `facts.json`. Deterministic for the same archives.
Not here: downloading (`fetch`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deploy.demo_model import tokenizer as tokens_of
from deploy.demo_model.data import tokens
from deploy.demo_model.data.chat import conversations
from deploy.demo_model.data.choose import Chooser, balanced, evenly, held_out
from deploy.demo_model.data.documents import Document, read_debian, read_wheel
from deploy.demo_model.data.sources import Source, read_sources

VOCAB, CONTEXT_TOKENS = 8192, 32768
TOKENIZER_SAMPLE_BYTES = 30_000_000
HELD_OUT_BYTES = 1_500_000  # of each kind


@dataclass(slots=True)
class Corpus:
    """The chosen documents, split."""

    train: list[Document] = field(default_factory=list)
    held_out: dict[str, list[Document]] = field(default_factory=lambda: {kind: [] for kind in tokens.HELD_OUT})

    def add(self, document: Document) -> None:
        """Puts a document where it belongs."""
        (self.held_out[document.kind] if held_out(document.source) else self.train).append(document)


def documents(sources: Iterable[Source], archives: Path) -> Iterator[Document]:
    """Every document of every archive, in the order of the list."""
    for source in sources:
        path = source.find(archives)
        yield from read_wheel(path).documents if source.registry == "pypi" else read_debian(path)


def collect(sources: Iterable[Source], archives: Path) -> Corpus:
    """Reads and chooses; conversations follow the file that they were made of."""
    corpus = Corpus()
    for document in Chooser().keep(documents(sources, archives)):
        corpus.add(document)
        if document.kind == "code":
            for conversation in conversations(document):
                corpus.add(conversation)
    corpus.train = balanced(corpus.train)
    return corpus


def encode(tokenizer: Tokenizer, documents: list[Document], batch: int = 256) -> Iterator[np.ndarray]:
    """The ids of documents, each ended by <|endoftext|>."""
    for first in range(0, len(documents), batch):
        texts = [d.text for d in documents[first : first + batch]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array([*encoding.ids, tokens_of.ENDOFTEXT], np.int64)


def prepare(corpus: Corpus, out: Path, vocab: int = VOCAB) -> dict[str, object]:
    """Writes the tokenizer and every file of tokens, and returns the facts."""
    out.mkdir(parents=True)
    tokenizer = tokens_of.train((d.text for d in evenly(corpus.train, TOKENIZER_SAMPLE_BYTES)), vocab)
    tokens_of.write(tokenizer, out, CONTEXT_TOKENS)
    facts: dict[str, object] = {
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
        "vocab": tokenizer.get_vocab_size(),
    }
    held_out = {kind: evenly(group, HELD_OUT_BYTES) for kind, group in corpus.held_out.items()}
    for name, group in ({tokens.TRAIN: corpus.train} | held_out).items():
        path = out / f"{name}{tokens.SUFFIX}"
        count = tokens.write(path, encode(tokenizer, group))
        facts[name] = {
            "documents": len(group),
            "kinds": {k: sum(d.kind == k for d in group) for k in tokens.HELD_OUT},
            "packages": len({d.source for d in group}),
            "text_bytes": sum(len(d.text.encode()) for d in group),
            "tokens": count,
            "file_bytes": path.stat().st_size,
            "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    (out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_model.data.prepare", description=__doc__)
    parser.add_argument("archives", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(json.dumps(prepare(collect(read_sources(), options.archives), options.out), indent=2))


if __name__ == "__main__":
    main()
