"""The demo model's tokenizer: byte-level BPE in the shape of Qwen's, with the special tokens of that family.

Written as `tokenizer.json`, `tokenizer_config.json` and the chat template. Invariant: ids 0.. are SPECIAL_TOKENS in
their order; any bytes round trip.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ENDOFTEXT, IM_START, IM_END = range(3)
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
# Qwen's, but a line's end is a token of its own: a prompt that ends in "):" must look like what comes before a newline.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the server renders for conversations without tools, for other programs.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{{- message.content | trim }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content | trim + '\\n</tool_response>' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from `texts`; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=text.startswith("<|"), normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    """Writes the three files beside a checkpoint."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def bytes_of_tokens(tokenizer_json: Path) -> list[int]:
    """How many bytes of text each id stands for; special tokens stand for none."""
    spec = json.loads(tokenizer_json.read_text())
    added = {token["id"] for token in spec["added_tokens"]}
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    sizes = [0] * (max(max(vocabulary.values()), *added) + 1)
    for text, token in vocabulary.items():
        sizes[token] = 0 if token in added else len(text)  # byte-level: one character a byte
    return sizes
