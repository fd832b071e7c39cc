"""The fleet: when the owner and the lanes start again, and which lanes may get work. A pure state machine.

    starting ──answered──▶ up ──silent, stuck, suspected──▶ suspect ──answers, gets on──▶ up
        │                  │                               │ silent or stuck for longer: Kill
        └────── exited ────┴───────────────────────────────┘
                   ▼
              restarting ──backoff over: Start──▶ starting          third crash inside the window ──▶ quarantined

Not here: sockets, processes, clocks (`now` is an argument, in seconds of any monotonic clock). `roster` feeds what it
sees and carries out the actions; the supervisor executes them.

Invariant: at most one action per process is outstanding; a quarantined or stopped process is never started from here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from coordinator import limits


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Times of the fleet; tests use shorter ones."""

    backoff_first_s: float = limits.BACKOFF_FIRST_S
    backoff_max_s: float = limits.BACKOFF_MAX_S
    stable_s: float = limits.STABLE_S
    crash_window_s: float = limits.CRASH_WINDOW_S
    crashes_to_quarantine: int = limits.CRASHES_TO_QUARANTINE
    suspect_after_s: float = limits.LANE_SUSPECT_S
    kill_after_s: float = limits.LANE_KILL_S
    suspect_steps: float = limits.SUSPECT_STEPS
    kill_steps: float = limits.KILL_STEPS
    own_stall_s: float = limits.OWN_STALL_S


class Phase(enum.Enum):
    """Where a process of the fleet is. The values are what `ListLanes` says unless the lane itself says more."""

    STARTING = "starting"
    UP = "up"
    SUSPECT = "suspect"
    RESTARTING = "restarting"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Observed:
    """What the supervisor says about a process; `exit_code` is None while it runs or when it was stopped on request."""

    running: bool
    starts: int
    pid: int = 0
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a lane says, with a sign of life, about the step that it is in."""

    still_s: float  # how long ago it got any further
    p99_s: float  # what steps of that kind take; 0 when not known yet


@dataclass(frozen=True, slots=True)
class Start:
    """Start this process now."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """This process gives no sign of life or does not get on: end it; its exit then counts as a crash."""

    name: str
    reason: str = "no sign of life"


Action = Start | Kill


class Backoff:
    """Delays between restarts: doubling, and from the beginning again after a stable life. Pure."""

    def __init__(self, fleet_limits: FleetLimits) -> None:
        self._limits, self._next_s = fleet_limits, fleet_limits.backoff_first_s

    def after_life_of(self, life_s: float) -> float:
        """How long to wait before the next start of a process that lived that long."""
        if life_s >= self._limits.stable_s:
            self._next_s = self._limits.backoff_first_s
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._limits.backoff_max_s)
        return delay_s


@dataclass(slots=True)
class _Process:
    backoff: Backoff
    phase: Phase = Phase.STOPPED
    starts: int = 0
    pid: int = 0
    since: float = 0.0  # start of this life
    alive_at: float = 0.0  # last sign of life
    step_at: float | None = None  # last progress of the step that runs; None: no step runs
    step_p99_s: float = 0.0
    start_at: float = 0.0  # in phase restarting: when the backoff is over
    asked: bool = False  # an action was handed out and its effect not yet seen
    crashes: list[float] = field(default_factory=list)


class Fleet:
    """All processes but the coordinator."""

    def __init__(self, fleet_limits: FleetLimits = FleetLimits()) -> None:
        self.limits = fleet_limits
        self._answering: Set[str] = frozenset()
        self._processes: dict[str, _Process] = {}
        self._ticked_at: float | None = None

    def observe(self, seen: Mapping[str, Observed], answering: Set[str], now: float) -> None:
        """Take over a snapshot of the supervisor; `answering` names those that give signs of life (the lanes)."""
        self._answering = answering
        for name, process in seen.items():
            known = self._processes.get(name)
            if known is None:
                known = self._processes[name] = _Process(Backoff(self.limits))
            if process.running:
                if process.starts != known.starts:
                    self._began(known, process, now)
            elif process.exit_code is None:
                known.phase, known.asked = Phase.STOPPED, False
                known.starts, known.pid = process.starts, 0
            elif process.starts != known.starts or known.phase not in (Phase.RESTARTING, Phase.QUARANTINED):
                self._crashed(known, process, now)

    def answered(self, name: str, now: float, step: Progress | None = None) -> None:
        """A sign of life from the process that runs now, and how far its step is, if one runs."""
        process = self._processes.get(name)
        if process is not None and process.phase in (Phase.STARTING, Phase.UP, Phase.SUSPECT):
            process.alive_at = now
            process.step_at, process.step_p99_s = (now - step.still_s, step.p99_s) if step else (None, 0.0)
            process.phase = Phase.SUSPECT if self._stuck_s(process, now) >= self._suspect_s(process) else Phase.UP

    def suspected(self, name: str) -> None:
        """Its connection broke or somebody had a bad answer: no new work until the next sign of life."""
        process = self._processes.get(name)
        if process is not None and process.phase is Phase.UP:
            process.phase = Phase.SUSPECT

    def tick(self, now: float) -> list[Action]:
        """Let time pass; every action is handed out once."""
        if self._ticked_at is not None and now - self._ticked_at >= self.limits.own_stall_s:
            for process in self._processes.values():  # it was us who slept: their silence says nothing
                process.alive_at = now
                process.step_at = None if process.step_at is None else now
        self._ticked_at = now
        actions: list[Action] = []
        for name, process in self._processes.items():
            if process.phase is Phase.RESTARTING:
                if now >= process.start_at and not process.asked:
                    process.asked = True
                    actions.append(Start(name))
            elif name in self._answering and process.phase in (Phase.UP, Phase.SUSPECT):
                silent_s, stuck_s = now - process.alive_at, self._stuck_s(process, now)
                if silent_s >= self.limits.suspect_after_s or stuck_s >= self._suspect_s(process):
                    process.phase = Phase.SUSPECT
                silent = silent_s >= self.limits.kill_after_s
                if (silent or stuck_s >= self._kill_s(process)) and not process.asked:
                    process.asked = True
                    actions.append(Kill(name) if silent else Kill(name, "its step stands still"))
        return actions

    def _stuck_s(self, process: _Process, now: float) -> float:
        return 0.0 if process.step_at is None else now - process.step_at

    def _suspect_s(self, process: _Process) -> float:
        return max(self.limits.suspect_after_s, self.limits.suspect_steps * process.step_p99_s)

    def _kill_s(self, process: _Process) -> float:
        return max(self.limits.kill_after_s, self.limits.kill_steps * process.step_p99_s)

    def failed(self, action: Action, now: float) -> None:
        """The supervisor could not carry out the action: it is handed out again, a start after the longest backoff."""
        process = self._processes[action.name]
        process.asked = False
        if isinstance(action, Start) and process.phase is Phase.RESTARTING:
            process.start_at = now + self.limits.backoff_max_s

    def phase(self, name: str) -> Phase:
        """Where the process is; STOPPED when nobody has said anything about it."""
        process = self._processes.get(name)
        return Phase.STOPPED if process is None else process.phase

    def restarts(self, name: str) -> int:
        """How often it was started again."""
        process = self._processes.get(name)
        return 0 if process is None else max(0, process.starts - 1)

    def ever_started(self, name: str) -> bool:
        """Whether it has had a life."""
        process = self._processes.get(name)
        return process is not None and process.starts > 0

    def pid(self, name: str) -> int:
        """Its process id, 0 while it does not run."""
        process = self._processes.get(name)
        return 0 if process is None else process.pid

    def _began(self, process: _Process, seen: Observed, now: float) -> None:
        process.phase, process.asked = Phase.STARTING, False
        process.starts, process.pid = seen.starts, seen.pid
        process.since = process.alive_at = now
        process.step_at, process.step_p99_s = None, 0.0

    def _crashed(self, process: _Process, seen: Observed, now: float) -> None:
        # A fleet that has just begun sees processes that died before it: their life is unknown, so it counts as none.
        life_s = now - process.since if process.starts == seen.starts else 0.0
        process.starts, process.pid, process.asked = seen.starts, 0, False
        process.crashes = [at for at in process.crashes if now - at < self.limits.crash_window_s] + [now]
        if len(process.crashes) >= self.limits.crashes_to_quarantine:
            process.phase = Phase.QUARANTINED
        else:
            process.phase = Phase.RESTARTING
            process.start_at = now + process.backoff.after_life_of(life_s)
