"""Text work for the doors: prompts to ids, off the event loop when they are long, and detokenizers for answers.

Not here: how a format looks (renderer), what a client may send (codecs). Invariant: a text whose ids cannot fit the
context is refused before it is encoded, so encoding is bounded by the context and not by the body.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from coordinator import limits
from coordinator.context_limit import too_long
from coordinator.errors import TokenizerMissing
from coordinator.text.answer_parser import AnswerParser
from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import Conversation
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.grammar import Bound, write_grammar
from coordinator.text.renderer import (
    IM_END,
    IM_START,
    THINK_END,
    Marker,
    PlainText,
    Segment,
    SpecialToken,
    opens_reasoning,
    render,
)
from coordinator.text.tokenizer import Tokenizer, TooManyTokens

_T = TypeVar("_T")


class TextDesk:
    """One tokenizer and a few threads. Without a tokenizer, only token ids can be asked and answered."""

    def __init__(self, tokenizer: Tokenizer | None, chat_format: ChatFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_format = chat_format or ChatFormat()
        self._threads = ThreadPoolExecutor(limits.TEXT_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """Ends the threads; what they are doing is finished and dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str, *, context_tokens: int) -> list[int]:
        """A plain prompt."""
        return await self._encode([PlainText(text)], context_tokens, param="prompt")

    async def encode_chat(self, conversation: Conversation, *, context_tokens: int) -> list[int]:
        """A conversation and the beginning of the answer."""
        size = sum(len(message.content) for message in conversation.messages)
        segments = await self.off_loop(
            size, limits.INLINE_ENCODE_CHARS, lambda: list(render(conversation, self.chat_format))
        )
        return await self._encode(segments, context_tokens, param="messages")

    async def bind(self, conversation: Conversation, bound: Bound, *, parallel: bool) -> tuple[Conversation, str]:
        """The conversation and the grammar of its answer. Thinking is left out where no token ends it."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise TokenizerMissing("this model was packed without a tokenizer", param=bound.param)
        if tokenizer.special(THINK_END) is None:
            conversation = replace(conversation, thinking=replace(conversation.thinking, on=False))
        in_reasoning, tools = opens_reasoning(conversation, self.chat_format), conversation.tools
        grammar = await asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: write_grammar(bound, tools, tokenizer, in_reasoning=in_reasoning, parallel=parallel),
        )
        return conversation, grammar

    def parser(self, conversation: Conversation, *, calls: bool) -> AnswerParser:
        """For one answer; without `calls`, what looks like a call is text."""
        return AnswerParser(
            {tool.name: tool for tool in conversation.tools} if calls and conversation.tools else None,
            in_reasoning=opens_reasoning(conversation, self.chat_format),
            thinks=self.chat_format.thinks,
        )

    def chat_end_ids(self) -> tuple[int, ...]:
        """What ends an assistant's turn, beside the model's own end ids."""
        end = self.tokenizer.special(IM_END) if self.tokenizer else None
        return () if end is None else (end,)

    def boundaries(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Where messages begin: a later prompt may go on from there. Of too many the first and the last ones."""
        start = self.tokenizer.special(IM_START) if self.tokenizer else None
        found: list[int] = []
        with contextlib.suppress(ValueError):  # no more of them; `index` looks at 3,000 ids in 20 µs, a loop in 250
            while start is not None:
                found.append(ids.index(start, found[-1] + 1 if found else 1))
        return tuple(
            found if len(found) <= limits.CHECKPOINT_HINTS else [found[0], *found[1 - limits.CHECKPOINT_HINTS :]]
        )

    def detokenizer(self) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self.tokenizer.token_bytes if self.tokenizer else lambda token_id: b"")

    def token_text(self, token_id: int) -> str:
        """One token for people."""
        return self.tokenizer.token_text(token_id) if self.tokenizer else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return self.tokenizer.token_bytes(token_id) if self.tokenizer else b""

    async def off_loop(self, size: int, inline_size: int, work: Callable[[], _T]) -> _T:
        """`work()`, in a thread when `size` is over `inline_size`."""
        if size <= inline_size:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _encode(self, segments: Sequence[Segment], context_tokens: int, param: str) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise TokenizerMissing("this model was packed without a tokenizer: send token ids", param=param)
        size = sum(len(segment.text) for segment in segments if isinstance(segment, PlainText))
        if size > context_tokens * tokenizer.longest_token_bytes:  # each character is at least a byte
            raise too_long(f"{size} characters, which are more tokens", context_tokens=context_tokens, param=param)
        try:
            return await self.off_loop(
                size, limits.INLINE_ENCODE_CHARS, lambda: _encode(tokenizer, segments, context_tokens)
            )
        except TooManyTokens:
            raise too_long(f"over {context_tokens} tokens", context_tokens=context_tokens, param=param) from None


def _encode(tokenizer: Tokenizer, segments: Sequence[Segment], at_most: int) -> list[int]:
    ids: list[int] = []
    for segment in segments:
        match segment:
            case PlainText(text):
                ids += tokenizer.encode(text, at_most=at_most - len(ids))
            case Marker(name) if tokenizer.special(name) is None:
                ids += tokenizer.encode(name)
            case Marker(name) | SpecialToken(name):
                special = tokenizer.special(name)
                if special is None:
                    raise TokenizerMissing(f"this model's tokenizer has no {name}: it has no chat format")
                ids.append(special)
    return ids
