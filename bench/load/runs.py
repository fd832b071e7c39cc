"""The scenarios of a report: which runs there are, in which order, and what is derived from several of them.

Not here: the command line (bench.__main__). Invariant: every report has the frame of bench.result, and names everything
that two runs must share to be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bench.aligned import Rules
from bench.load import drive
from bench.load.compare import ratio_of
from bench.load.door import Reply
from bench.load.figures import Goals, figures, rows

FORMAT = 1
_Value = TypeVar("_Value")
SCENARIOS = ("closed", "open", "interference", "long-short")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for beside the work itself."""

    scenario: str
    concurrency: tuple[int, ...]  # closed: one run for each; interference: the last one is the number of others
    seconds: tuple[float, ...]  # of each of these runs, or one for all
    rate_per_s: float
    rounds: int
    rules: tuple[Rules, ...]  # likewise
    goals: Goals

    def run(self, number: int) -> Asked:
        """What is asked of that run alone."""
        return replace(self, seconds=(_each(self.seconds, number),), rules=(_each(self.rules, number),))


def _each(given: tuple[_Value, ...], number: int) -> _Value:
    return given[number] if len(given) > 1 else given[0]


async def run(work: drive.Work, asked: Asked, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the scenario; the `runs` of a report and what follows from them."""
    match asked.scenario:
        case "closed":
            runs = {}
            for number, agents in enumerate(asked.concurrency):
                one = asked.run(number)
                say(f"{agents} agents for {one.seconds[0]:g} s")
                cold = replace(work, nonce=f"{work.nonce}.{agents}")  # nothing of the run before helps this one
                runs[f"{agents} agents"] = await _timed(
                    one, drive.closed_loop(cold, agents, one.seconds[0]), alone=agents == 1
                )
            return {
                "runs": runs, "idle_lanes": idle_lanes(runs), "window_s": windows_s(runs),
                **_scaling(asked.concurrency, runs),
            }  # fmt: skip
        case "open":
            say(f"{asked.rate_per_s:g} conversations a second for {asked.seconds[0]:g} s")
            return {"runs": {"open": await _timed(asked, drive.open_loop(work, asked.rate_per_s, asked.seconds[0]))}}
        case "interference":
            others = asked.concurrency[-1]
            say(f"a victim alone and beside 1 to {others} others, {asked.rounds} rounds")
            began_s = time.monotonic()
            seen = await drive.interference(work, asked.rounds, others)
            seconds = time.monotonic() - began_s
            names = {count: "alone" if not count else f"+{count}" for count in seen}
            return {
                "runs": {
                    names[count]: _part(asked, replies, seconds, by_turns=True) for count, replies in seen.items()
                },
                "interference": _slower(seen),
            }
        case "long-short":
            say(f"a short question alone and behind a long prompt, {asked.rounds} rounds")
            began_s = time.monotonic()
            turns = await drive.short_behind_long(work, asked.rounds)
            seconds = time.monotonic() - began_s
            return {"runs": {name: _part(asked, each, seconds, by_turns=True) for name, each in turns.items()}}
        case other:
            raise ValueError(f"no scenario {other!r}")


async def _timed(asked: Asked, replies: Awaitable[Sequence[Reply]], *, alone: bool = False) -> dict[str, Any]:
    began_s = time.monotonic()
    found = await replies
    return _part(asked, found, time.monotonic() - began_s, alone=alone)


def _part(
    asked: Asked, replies: Sequence[Reply], seconds: float, *, by_turns: bool = False, alone: bool = False
) -> dict[str, Any]:
    """`by_turns`: parts of one run that took turns, so that a part has gaps and no rate of its own."""
    found = figures(replies, asked.rules[0], asked.goals, seconds, alone=alone)
    return {"figures": {**found, "aggregate": None} if by_turns else found, "rows": rows(replies)}


def idle_lanes(runs: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Lanes that answered in some run of this report and wrote nothing in this one."""
    wrote = {name: set((run["figures"]["aggregate"] or {"lanes": {}})["lanes"]) for name, run in runs.items()}
    every = set().union(*wrote.values())
    return {name: sorted(every - lanes) for name, lanes in wrote.items() if every - lanes}


def windows_s(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The common window of each run whose window counts."""
    totals = {name: run["figures"]["aggregate"] for name, run in runs.items()}
    return {name: total["window_s"] for name, total in totals.items() if total and total["valid"]}


def _scaling(concurrency: Sequence[int], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each run's aggregate over lanes × the solo aggregate; only where both count."""
    solo = runs.get("1 agents", {}).get("figures", {}).get("aggregate")
    if not solo or not solo["valid"] or not solo["tokens_per_s"]:
        return {}
    found = {}
    for agents in concurrency:
        total = runs[f"{agents} agents"]["figures"]["aggregate"]
        if total and total["valid"]:
            found[f"{agents} agents"] = total["tokens_per_s"] / (len(total["lanes"]) * solo["tokens_per_s"])
    return {"scaling_efficiency": found}


def _slower(seen: dict[int, list[Reply]]) -> dict[str, dict[str, float]]:
    """How much longer the victim's tokens take beside others, paired with the same request alone."""
    alone = {reply.key: reply for reply in seen[0] if reply.error is None and reply.gaps_s}
    found = {}
    for count, replies in seen.items():
        logs = [
            math.log(_mean(reply.gaps_s) / _mean(alone[reply.key].gaps_s))
            for reply in replies
            if count and reply.error is None and reply.gaps_s and reply.key in alone
        ]
        if logs:
            ratio = ratio_of(logs, "gap_s")
            found[str(count)] = {"pairs": ratio.pairs, "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
