"""What agents ask, as data: turns of sessions, synthetic by name or read from a file of JSON lines.

    {"session": "a", "parent": null, "tenant": "t", "new_tokens": 800, "output_tokens": 120, "think_s": 1.5}

A session's turn begins `think_s` after the one before it has ended (`open`: after that one was asked). Its prompt is
everything said so far and `new_tokens` more. Invariant: a synthetic trace is a function of its name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    session: str
    new_tokens: int
    output_tokens: int
    think_s: float
    tenant: str = "one"
    parent: str | None = None
    open: bool = False  # does not wait for the answer to the turn before it


Trace = list[list[Turn]]  # by session


def read_trace(path: Path) -> Trace:
    """Turns of a file, by session in the order of their lines. ValueError names the line that is wrong."""
    sessions: dict[str, list[Turn]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), 1):
            try:
                if len(line) > LINE_BYTES_MAX:
                    raise ValueError("too long")
                turn = Turn(**json.loads(line))
                if min(turn.new_tokens, turn.output_tokens) < 1 or not 0 <= turn.think_s < 1e6:
                    raise ValueError("numbers out of range")
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {number}: {error}") from None
            sessions.setdefault(turn.session, []).append(turn)
    return list(sessions.values())


def conversations(count: int, turns: int, seed: int, think_s: float = 2.0) -> Trace:
    """Equal agents in a closed loop: a long first prompt, short turns, think time uniform from nothing to `think_s`."""
    chance = random.Random(seed)  # noqa: S311  a trace, nothing secret
    return [
        [
            Turn(
                f"s{agent}",
                chance.randint(2000, 12_000) if turn == 0 else chance.randint(50, 1500),
                chance.randint(30, 400),
                chance.uniform(0.0, think_s),
            )
            for turn in range(turns)
        ]
        for agent in range(count)
    ]


def sub_agents() -> Trace:
    """Three agents; each starts four helpers with short lives of their own now and then."""
    chance, trace = random.Random(11), []  # noqa: S311
    for agent in range(3):
        trace.append(conversations(1, 30, 100 + agent)[0])
        trace[-1] = [_renamed(turn, f"a{agent}", None) for turn in trace[-1]]
        for helper in range(4):
            start_s = chance.uniform(5.0, 120.0)
            turns = [_renamed(turn, f"a{agent}h{helper}", f"a{agent}") for turn in conversations(1, 6, helper)[0]]
            trace.append([_delayed(turns[0], start_s), *turns[1:]])
    return trace


def noisy_tenant(times: int, span_s: float = 1800.0) -> Trace:
    """Four tenants with short requests at a calm rate, and one that sends `times` as many as one of them."""
    chance, trace = random.Random(5), []  # noqa: S311
    calm_s = 6.0
    for tenant in range(4):
        trace.append(_stream(f"calm{tenant}", calm_s, span_s, chance))
    trace.append(_stream("loud", calm_s / times, span_s, chance))
    return trace


def _stream(tenant: str, every_s: float, span_s: float, chance: random.Random) -> list[Turn]:
    # turns of one session would grow without end: each is a session of its own, all of one line of arrivals
    return [
        Turn(f"{tenant}/{k}", chance.randint(200, 900), chance.randint(20, 80), chance.expovariate(1 / every_s),
             tenant, open=True)
        for k in range(int(span_s / every_s))
    ]  # fmt: skip


def _renamed(turn: Turn, session: str, parent: str | None) -> Turn:
    return Turn(session, turn.new_tokens, turn.output_tokens, turn.think_s, turn.tenant, parent, turn.open)


def _delayed(turn: Turn, seconds: float) -> Turn:
    return Turn(turn.session, turn.new_tokens, turn.output_tokens, seconds, turn.tenant, turn.parent, turn.open)


TRACES: dict[str, Callable[[], Trace]] = {
    "4-conversations": lambda: conversations(4, 25, 4),
    "6-conversations": lambda: conversations(6, 25, 6),
    "9-conversations": lambda: conversations(9, 25, 9),
    "sub-agents": sub_agents,
    "batch-of-30": lambda: [[Turn(f"b{k}", 500 + 400 * k, 30 + 37 * k % 370, 0.0)] for k in range(30)],
    "calm-tenants": lambda: noisy_tenant(1),
    "loud-tenant-100x": lambda: noisy_tenant(100),
}
