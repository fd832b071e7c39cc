"""The scripts of a workload in token ids along a synthetic model's walk: as many tokens as the workload states.

A conversation begins at a place of the walk that follows from the seed, its turns go on where the answer before them
ended. So the experts that are used are those of a conversation that drifts from topic to topic, in prompts, too.

Invariant: as of `workloads.script`, the nonce changes the first ids of the system prompt and nothing else.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from bench.load.workloads import Script, Scripts, Turn, Workload
from bench.synthetic.shape import SHAPES
from bench.synthetic.walk import Walk, walk

NONCE_TOKENS = 8


@functools.cache
def walk_of(name: str) -> Walk:
    """Of the synthetic model of that scale."""
    return walk(SHAPES[name].config.vocab_size, SHAPES[name].topics)


def scripts_along(path: Walk) -> Scripts:
    """Like `workloads.script`, in ids of this walk."""
    size = len(path.order)

    def script(workload: Workload, scale: float, seed: int, agent: int, session: int, nonce: str = "") -> Script:
        own = random.Random(f"{workload.name}/{seed}/{agent}/{session}")  # noqa: S311  places, no secrets
        shared = random.Random(f"{workload.name}/{seed}/system")  # noqa: S311
        first = random.Random(f"nonce/{nonce}")  # noqa: S311

        def turns(given: tuple[Turn, ...]) -> tuple[tuple[tuple[int, ...], Turn], ...]:
            place, made = own.randrange(size), []
            for turn in given:
                count, answer = (max(1, round(n * scale)) for n in (turn.tokens, turn.answer_tokens))
                made.append((tuple(path.stretch(place, count)), Turn(turn.tokens, answer, turn.pause_s * scale)))
                place += count + answer
            return tuple(made)

        system = path.stretch(shared.randrange(size), max(1, round(workload.system_tokens * scale)))
        marked = path.stretch(first.randrange(size), NONCE_TOKENS) if nonce else []
        return Script((*marked, *system), turns(workload.turns), tuple(turns(branch) for branch in workload.branches))

    return script


def follower(path: Walk) -> Callable[[int, int], list[int]]:
    """The answer after an id: so many ids along the walk."""
    place_of = {token: place for place, token in enumerate(path.order.tolist())}
    return lambda last, tokens: path.stretch(place_of[last] + 1, tokens)
