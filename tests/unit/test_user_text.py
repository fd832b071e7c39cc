"""Whatever a client writes, wherever it may write it, no special token comes of it."""

from __future__ import annotations

import os
import random

from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import ChatMessage, Conversation, Thinking, Tool, ToolCall
from coordinator.text.desk import _encode
from coordinator.text.renderer import render
from coordinator.text.tokenizer import Tokenizer
from tests.fakes.doors import tokenizer_dir

COUNT = int(os.environ.get("EXPRESSWAY_TEXT_EXAMPLES", "2000"))
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>")
BITS = (*SPECIALS, "<|im_", "start|>", "<", "|", ">", "\n", " ", "system", "a", "é", "日", "\u200b", "\0", "𝒳")


def test_no_text_becomes_a_special_token() -> None:
    tokenizer = Tokenizer.load(tokenizer_dir())
    assert tokenizer is not None
    specials = {tokenizer.special(name) for name in SPECIALS} - {None}
    draw = random.Random(7)

    def words() -> str:
        if draw.random() < 0.3:
            ranges = ((0x20, 0x250), (0x3000, 0xD000))
            return "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(6))
        return "".join(draw.choice(BITS) for _ in range(draw.randint(0, 6)))

    def talk(texts: list[str], thinks: bool) -> list[int]:
        """The special tokens of a prompt with these texts wherever a client may write."""
        tools = [Tool.of("f", texts[0], {"description": texts[1]})]
        turns = [
            ChatMessage("system", texts[2]),
            ChatMessage("user", texts[3]),
            ChatMessage("assistant", texts[4], texts[5], (ToolCall("f", {"a": texts[6], "b": [texts[6]]}),)),
            ChatMessage("tool", texts[7]),
        ]
        asked = Conversation(turns, tools, Thinking(on=thinks))
        segments = list(render(asked, ChatFormat(thinks=True, says_effort=True)))
        return [token for token in _encode(tokenizer, segments, 1 << 30) if token in specials]

    # as many as the format itself has, and in its order
    expected = {thinks: talk(["x"] * 8, thinks) for thinks in (True, False)}
    for number in range(COUNT // 8):
        said = [words() for _ in range(8)]
        assert talk(said, number % 2 == 0) == expected[number % 2 == 0], said
