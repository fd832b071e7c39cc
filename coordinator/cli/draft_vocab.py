"""`expressway draft-vocab`: a draft vocabulary for a pack, from texts like the ones it will be asked to write.

Not here: which ids (draft_vocabulary). Invariant: the file is whole or not there; an old one is not replaced unasked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from coordinator.config import check_pack
from coordinator.draft_vocabulary import choose
from coordinator.errors import BadOption
from coordinator.generation_config import GenerationConfig
from coordinator.pack_facts import read_digests
from coordinator.text.tokenizer import Tokenizer

DEFAULT_SIZE = 32_768
MOST_SIZE = 1 << 21
ENDS = ("<|im_end|>", "<|endoftext|>")


@click.command(short_help="Choose the ids that PACK's draft layer may name.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.argument(
    "texts", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False, readable=True)
)
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="A new file, for --draft-vocab of serve.")  # fmt: skip
@click.option("--size", type=click.IntRange(1, MOST_SIZE), default=DEFAULT_SIZE, show_default=True, metavar="N",
              help="Ids at most.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(pack: Path, texts: tuple[Path, ...], out: Path, size: int, as_json: bool) -> None:
    """Choose the ids that PACK's draft layer may name: the most frequent ones of TEXTS, and what ends an answer.

    A smaller head makes guesses cheaper; a token outside is answered as ever, only never drafted.
    """
    digests = read_digests(check_pack(pack))
    tokenizer = Tokenizer.load(pack, digests)
    if tokenizer is None:
        raise BadOption(f"{pack}: the pack has no tokenizer")
    ids = [token for text in texts for token in tokenizer.encode(text.read_text(encoding="utf-8", errors="replace"))]
    if not ids:
        raise BadOption("the texts are empty")
    named = (tokenizer.special(name) for name in ENDS)
    ends = {*GenerationConfig.load(pack, digests).end_ids, *(token for token in named if token is not None)}
    chosen = choose(ids, size, ends)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump({"draft_vocabulary": 1, "ids": chosen.ids}, stream)
    found = {"file": str(out), "ids": len(chosen.ids), "tokens": len(ids),
             "coverage": round(chosen.counted, 4), "coverage_held_out": round(chosen.held_out, 4)}  # fmt: skip
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(
            f"{out}: {len(chosen.ids)} ids, {chosen.counted:.1%} of the text's tokens; "
            f"{chosen.held_out:.1%} of its last tenth, which was not counted"
        )
