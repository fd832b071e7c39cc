"""Workloads as data: how many agents' turns of which length, with which pauses; and the texts, from a seed.

Sizes are in words of English-like text; how many tokens a word is depends on the tokenizer, so reports carry the
server's own counts. Not here: sending anything. Invariant: one (workload, scale, seed, agent, session) is one script,
on any machine; a test keeps the digest of all of them. Only the nonce differs between runs, so that no server has
read a cold prompt before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Text: TypeAlias = str | tuple[int, ...]  # words, or token ids

TOKENS_PER_WORD = 1.33  # of English in vocabularies of 100,000 and more; used to turn stated tokens into words


@dataclass(frozen=True, slots=True)
class Turn:
    """What the agent adds, what it lets the model write, and how long its tool then runs."""

    tokens: int
    answer_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One conversation; with `branches`, sub-agents that go on from its first turn at the same time."""

    name: str
    style: str
    system_tokens: int
    turns: tuple[Turn, ...]
    branches: tuple[tuple[Turn, ...], ...] = field(default=())


def _grown(first: int, step: int, count: int, answer: int, pause_s: float) -> tuple[Turn, ...]:
    return (Turn(first, answer, pause_s), *(Turn(step, answer, pause_s) for _ in range(count - 1)))


_ALL = (
    Workload("code", "code", 200, (Turn(400, 512),)),
    Workload("fiction", "fiction", 50, (Turn(80, 768),)),
    Workload("reasoning", "reasoning", 50, (Turn(150, 1024),)),
    Workload("review", "code", 300, (Turn(30_000, 512),)),
    Workload("question", "fiction", 20, (Turn(30, 64),)),
    # a repository's issue: read, edit, test
    Workload("repository-fix", "code", 12_000, (Turn(1_500, 400, 2.0), Turn(6_000, 500, 8.0), Turn(2_500, 300))),
    # the same with sub-agents that grow to 60K tokens, beside each other
    Workload(
        "repository-agents", "code", 12_000, (Turn(1_500, 400, 1.0),),
        tuple(_grown(2_000, 6_000, 8, 300, 1.5) for _ in range(3)),
    ),
    # thirteen short turns over a system prompt and tools of 24.5K tokens
    Workload("mailbox", "fiction", 24_500, _grown(300, 250, 13, 150, 1.0)),
)  # fmt: skip
WORKLOADS = {each.name: each for each in _ALL}

_WORDS = {
    "code": "def return self value index buffer for in range if else raise import class async await None True list "
    "( ) [ ] : = + - . , dict key path read write offset length error test assert with open lambda yield",
    "fiction": "the a road rain night she he walked and then river stone lantern quiet door under over again said old "
    "voice morning while far letter bridge never always turned light hand house winter slowly because . , ? she",
    "reasoning": "let x y n be the sum of and if then so therefore prove that = + - * / ( ) 2 3 5 7 11 13 number prime "
    "even odd divides remainder case suppose contradiction equals less more than each step . ,",
}


@dataclass(frozen=True, slots=True)
class Script:
    """The texts of one conversation: system prompt, then (text, answer tokens, pause) per turn."""

    system: Text
    turns: tuple[tuple[Text, Turn], ...]
    branches: tuple[tuple[tuple[Text, Turn], ...], ...]


Scripts: TypeAlias = Callable[[Workload, float, int, int, int, str], Script]  # arguments as those of `script`


def script(workload: Workload, scale: float, seed: int, agent: int, session: int, nonce: str = "") -> Script:
    """The conversation number `session` of agent number `agent`. The system prompt is every agent's, as with real ones.

    `nonce` begins the system prompt: with a new one nothing of it was ever read; scale 0.1 is a tenth of all tokens.
    """
    own = random.Random(f"{workload.name}/{seed}/{agent}/{session}")  # noqa: S311  texts, no secrets
    shared = random.Random(f"{workload.name}/{seed}/system")  # noqa: S311

    def turns(given: tuple[Turn, ...]) -> tuple[tuple[str, Turn], ...]:
        return tuple(
            (
                _text(own, workload.style, turn.tokens * scale),
                Turn(turn.tokens, max(1, round(turn.answer_tokens * scale)), turn.pause_s * scale),
            )
            for turn in given
        )

    system = _text(shared, workload.style, workload.system_tokens * scale)
    return Script(
        f"[{nonce}] {system}" if nonce else system,
        turns(workload.turns),
        tuple(turns(branch) for branch in workload.branches),
    )


def _text(source: random.Random, style: str, tokens: float) -> str:
    words = _WORDS[style].split()
    return " ".join(source.choices(words, k=max(1, round(tokens / TOKENS_PER_WORD))))


def digest() -> str:
    """SHA-256 over all workloads at a small scale: the same numbers are the same work."""
    texts = [repr(script(each, 0.02, 7, agent, session)) for each in _ALL for agent in (0, 1) for session in (0, 1)]
    return hashlib.sha256("\n".join([repr(_ALL), *texts]).encode()).hexdigest()
