"""A small byte-level BPE tokenizer in the shape of Qwen's, trained on a text that stands in this file.

Deterministic: the same vocabulary size gives the same `tokenizer.json`. Not a good tokenizer, only a true one: any
bytes round trip, special tokens have their real names. Invariant: ids 0..4 are the five special tokens below.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

ENDOFTEXT, IM_START, IM_END, THINK, END_THINK = range(5)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PROSE = """\
An express train stops at few stations and so arrives early. The line it runs on is shared, the timetable is written
down, and no train waits for another unless the points ahead are set against it. A good signalman knows which lane is
free, how long each train will need, and what to do when one of them breaks down between two stations.

The coordinator takes a request, looks at its session, and asks which lane would answer first. If a lane has already
read most of the conversation, it is often worth waiting for; if the queue in front of it is long, reading again on an
idle lane is quicker. The answer is streamed back word by word. When the reader goes away, the lane stops within a step.

Memory is where the experts live. There is one copy for every machine, sealed once it has been checked, and every
process maps the same pages. Nothing is written there again. A process that dies leaves nothing behind, and the next one
maps the same bytes before the kettle has boiled.

"What is the capital of France?" asked the teacher. "It is Paris," said the child, "and the river is called the Seine."
Could you please write a short function that reverses a list? Yes, of course; here it is. Thank you very much!
Why does the sky look blue? Because small particles scatter short waves of light more strongly than long ones.
The quick brown fox jumps over the lazy dog. Once upon a time there was a small house near a forest, and in it lived an
old woman, her daughter, two cats and a clever mouse who could count from one to one hundred and back again.

def reverse(items):
    result = []
    for index in range(len(items) - 1, -1, -1):
        result.append(items[index])
    return result

class Lane:
    def __init__(self, name: str, budget_bytes: int) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.tokens = 0

    def step(self, window):
        if window is None or not window.rows:
            raise ValueError("a window has at least one row")
        self.tokens += len(window.rows)
        return {"name": self.name, "tokens": self.tokens, "finished": False}

import os, sys, json, time
if __name__ == "__main__":
    print("Hello, world!", json.dumps({"status": "ok", "value": 3.14159, "list": [1, 2, 3]}))

# A heading
- first point, with a [link](https://example.org/path?query=1)
- second point: `code`, **bold**, *italic*
| name | value |
| --- | --- |
| left | right |
"""
_STEMS = """\
act add answer ask begin build call carry change check come count cover cross cut draw end enter fall fill find form
give grow hand head help hold keep know lead learn leave light line look mark measure meet move name open order pass
place plan plant point port press question reach read record rest return roll round run say serve set shape show sign
sound stand start state stay step stop store stream take talk tell test think touch train turn use view wait walk
watch water wonder word work write
"""
_PREFIXES = ("", "re", "un", "over", "under", "out")
_SUFFIXES = ("", "s", "ed", "ing", "er", "able", "ment", "less", "ful", "ness")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def training_lines() -> list[str]:
    """The text the merges are learnt from."""
    words = ("".join(parts) for parts in itertools.product(_PREFIXES, _STEMS.split(), _SUFFIXES))
    return [*_PROSE.splitlines(keepends=True), " ".join(words)]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja for at most `vocab_size` tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of at least {SMALLEST_VOCAB}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=not text.endswith("think>"), normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(training_lines(), trainer)
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 262144,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
