"""Placement and fairness on simulated lanes, against simpler rules: `python -m bench.placement [--trace FILE]`.

The coordinator's own pure policies decide here as they do in service (lane_rules); lanes are a cost model: reading and
writing at constant rates, and a memory of conversations in tokens, the least recently used one forgotten first. Not
here: sockets and faults (tests/fault/test_history.py). Invariant: a run is a function of trace, rule and hardware.

`ours-parked`: conversations lie in the host's pool as well, and any lane takes them back at `restore_tokens_per_s`.
`ideal` serves first come first on lanes that share all they remember and forget nothing: what a scheduler reaches that
is never idle while somebody waits and never has a prompt read twice.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import result
from bench.agent_traces import TRACES, Trace, Turn, conversations, read_trace
from bench.lane_rules import Asked, make
from coordinator.policy.rates import Counted

OVER_TRACES = 8
RULES = ("ours", "ours-parked", "first-free", "round-robin", "least-loaded", "strict", "ideal")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Of the lanes."""

    lanes: int = 3
    prefill_tokens_per_s: float = 1500.0
    decode_tokens_per_s: float = 25.0
    memory_tokens: int = 150_000
    restore_tokens_per_s: float = 30_000.0


@dataclass(slots=True)
class _Lane:
    name: str
    busy_until: float = 0.0
    memory: OrderedDict[str, int] = field(default_factory=OrderedDict)
    counted: Counted = field(default_factory=lambda: Counted(3000, 2.0, 50, 2.0))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run; times in seconds."""

    wait_p50: float
    wait_p95: float
    first_token_p50: float
    first_token_p95: float
    jain: float  # over sessions: share of their time in which they were served
    read_again_tokens: int
    output_tokens_per_s: float
    makespan: float
    refused: int
    wait_p99: dict[str, float]  # by tenant, those with a number together


class Simulation:
    """One trace under one rule."""

    def __init__(self, trace: Trace, rule: str, hardware: Hardware) -> None:
        self._hardware, self._share_memory = hardware, rule == "ideal"
        self._lanes = {name: _Lane(name) for name in (f"lane-{k}" for k in range(hardware.lanes))}
        self._rule = make(rule, list(self._lanes))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._said: dict[str, int] = {}  # tokens of a session so far
        self.done: list[Asked] = []
        self._refused = 0
        self._parked = rule == "ours-parked"
        for turns in trace:
            self._ask_next(iter(turns), 0.0)

    def run(self) -> Figures:
        """To the end of the trace."""
        while self._events:
            now, _, what = heapq.heappop(self._events)
            what(now)
        return figures(self.done, self._refused)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _ask_next(self, turns: Iterator[Turn], now: float) -> None:
        turn = next(turns, None)
        if turn is not None:
            self._at(now + turn.think_s, lambda at: self._arrive(turn, turns, at))

    def _arrive(self, turn: Turn, rest: Iterator[Turn], now: float) -> None:
        known = self._said.get(turn.session, 0)
        asked = Asked(turn, rest, known + turn.new_tokens, now, known)
        self._said[turn.session] = asked.prompt_tokens + turn.output_tokens
        self._refused += not self._rule.arrive(asked, now)
        if turn.open:
            self._ask_next(rest, now)
        self._begin_all(now)

    def _begin_all(self, now: float) -> None:
        while True:
            chosen = self._rule.next({lane.name: max(0.0, lane.busy_until - now) for lane in self._lanes.values()}, now)
            if isinstance(chosen, float):
                self._at(now + chosen, self._begin_all)
            if chosen is None or isinstance(chosen, float):
                return
            self._begin(chosen[0], self._lanes[chosen[1]], now)

    def _begin(self, asked: Asked, lane: _Lane, now: float) -> None:
        assert lane.busy_until <= now, "the rule names idle lanes only"
        session, hardware = asked.turn.session, self._hardware
        remembered = asked.known_tokens if self._share_memory else lane.memory.get(session, 0)
        asked.began, asked.read_tokens = now, asked.prompt_tokens - remembered
        restore_s = 0.0
        if self._parked:
            asked.read_tokens = asked.prompt_tokens - asked.known_tokens
            restore_s = (asked.known_tokens - remembered) / hardware.restore_tokens_per_s
        asked.first_token = now + restore_s + asked.read_tokens / hardware.prefill_tokens_per_s
        asked.ended = lane.busy_until = asked.first_token + asked.turn.output_tokens / hardware.decode_tokens_per_s
        self._at(asked.ended, lambda at: self._end(asked, lane, at))

    def _end(self, asked: Asked, lane: _Lane, now: float) -> None:
        session = asked.turn.session
        lane.memory[session] = asked.prompt_tokens + asked.turn.output_tokens
        lane.memory.move_to_end(session)
        forgotten = []
        while sum(lane.memory.values()) > self._hardware.memory_tokens and len(lane.memory) > 1:
            forgotten.append(lane.memory.popitem(last=False)[0])
        counted = lane.counted
        lane.counted = Counted(
            counted.prompt_tokens + asked.read_tokens,
            counted.prefill_s + asked.first_token - asked.began,
            counted.generated_tokens + asked.turn.output_tokens,
            counted.decode_s + asked.ended - asked.first_token,
        )
        self._rule.ended(asked, lane.name, lane.counted, forgotten)
        self.done.append(asked)
        if not asked.turn.open:
            self._ask_next(asked.rest, now)
        self._begin_all(now)


def figures(done: list[Asked], refused: int) -> Figures:
    """What a run comes to."""
    waits = sorted(asked.began - asked.arrived for asked in done)
    firsts = sorted(asked.first_token - asked.arrived for asked in done)
    served: dict[str, list[float]] = {}
    tenants: dict[str, list[float]] = {}
    for asked in done:
        known = served.setdefault(asked.turn.session, [0.0, 0.0])
        known[0] += asked.ended - asked.began
        known[1] += asked.ended - asked.arrived
        tenants.setdefault(asked.turn.tenant.rstrip("0123456789"), []).append(asked.began - asked.arrived)
    shares = [had / lasted for had, lasted in served.values()]
    makespan = max(asked.ended for asked in done)
    return Figures(
        wait_p50=round(statistics.median(waits), 3),
        wait_p95=round(_quantile(waits, 0.95), 3),
        first_token_p50=round(statistics.median(firsts), 3),
        first_token_p95=round(_quantile(firsts, 0.95), 3),
        jain=round(sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)), 4),
        read_again_tokens=sum(asked.read_tokens - (asked.prompt_tokens - asked.known_tokens) for asked in done),
        output_tokens_per_s=round(sum(asked.turn.output_tokens for asked in done) / makespan, 3),
        makespan=round(makespan, 1),
        refused=refused,
        wait_p99={tenant: round(_quantile(sorted(each), 0.99), 3) for tenant, each in tenants.items()},
    )


def steady_tokens_per_s(done: list[Asked]) -> float:
    """Output while all sessions are under way: from the last one's first token to the first one's last."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for asked in done:
        session = asked.turn.session
        begun[session] = min(begun.get(session, asked.first_token), asked.first_token)
        ended[session] = max(ended.get(session, 0.0), asked.ended)
    begin, end = max(begun.values()), min(ended.values())
    inside = (
        asked.turn.output_tokens
        * max(0.0, min(end, asked.ended) - max(begin, asked.first_token))
        / (asked.ended - asked.first_token)
        for asked in done
    )
    return sum(inside) / (end - begin)


def oversubscription(hardware: Hardware) -> dict[str, dict[str, list[float]]]:
    """Steady output over the ideal's by conversations and rule: median and least of `OVER_TRACES` traces."""
    found: dict[str, dict[str, list[float]]] = {}
    for count in (4, 6, 9):
        traces = [conversations(count, 40, seed) for seed in range(count, count + OVER_TRACES)]
        rates = {}
        for rule in ("ideal", "ours", "ours-parked", "first-free"):
            runs = [Simulation(trace, rule, hardware) for trace in traces]
            for run in runs:
                run.run()
            rates[rule] = [steady_tokens_per_s(run.done) for run in runs]
        ideal = rates.pop("ideal")
        shares = {rule: sorted(a / b for a, b in zip(each, ideal, strict=True)) for rule, each in rates.items()}
        found[str(count)] = {rule: [round(statistics.median(s), 3), round(s[0], 3)] for rule, s in shares.items()}
    return found


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def batch_bound_s(trace: Trace, hardware: Hardware) -> float:
    """No schedule of requests that are all there at once ends sooner: all lanes busy all the time, or the longest."""
    works_s = [
        turn.new_tokens / hardware.prefill_tokens_per_s + turn.output_tokens / hardware.decode_tokens_per_s
        for turns in trace
        for turn in turns
    ]
    return max(sum(works_s) / hardware.lanes, max(works_s))


def main() -> None:
    """Runs every trace under every rule and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="turns as JSON lines, instead of the synthetic traces")
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = Hardware(lanes=options.lanes)
    traces = {options.trace.name: read_trace(options.trace)} if options.trace else {n: t() for n, t in TRACES.items()}
    runs = {
        name: {rule: asdict(Simulation(trace, rule, hardware).run()) for rule in RULES}
        for name, trace in traces.items()
    }
    bounds = {
        name: round(runs[name]["ours"]["makespan"] / batch_bound_s(trace, hardware), 3)
        for name, trace in traces.items()
        if all(turn.think_s == 0 for turns in trace for turn in turns)
    }
    framed = result.frame(
        "bench.placement", [word for word in sys.argv[1:] if word != "--out" and word != str(options.out)],
        pack={"name": "none"}, conditions={"simulated": asdict(hardware)},
    )  # fmt: skip
    measured = {"traces": runs, "makespan_over_bound": bounds, "oversubscription": oversubscription(hardware)}
    result.write({**framed, **measured}, options.out)


if __name__ == "__main__":
    main()
