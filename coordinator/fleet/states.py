"""The fleet: the one truth about every process of the cluster but the coordinator. A pure state machine.

    starting ──answers──▶ warming ──says ready──▶ ready ──silent, stuck, suspected──▶ suspect ──gets on──▶ ready
       │ no answer: Kill     │                      │ ◀──undrain──▶ draining            │ for longer: Kill
       └──────── exited ─────┴──────────────────────┴──────────────────┴────────────────┘
                   ▼
                 dead ──backoff over: Start──▶ starting     third crash inside the window ──▶ quarantined ──undrain──▶

Not here: sockets, processes, clocks (`now` is an argument, in seconds of one monotonic clock). `roster` feeds what it
sees and carries out the actions; the supervisor executes them. `/healthz`, gRPC health, status, metrics and placement
all show `phase`.

Invariants: at most one action per process is outstanding; a quarantined process, or one that was stopped on request, is
never started from here, before somebody says `undrain`; the owner, without whom no lane starts, is never quarantined.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from coordinator import limits

OWNER = "owner"


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
    start_s: float = limits.LANE_START_S


class Phase(enum.Enum):
    """Where a process of the fleet is. The values are what everybody is told."""

    STARTING = "starting"  # has not answered yet
    WARMING = "warming"  # answers, and says that it is not ready
    READY = "ready"
    DRAINING = "draining"  # out of service on request, whether it runs or not
    SUSPECT = "suspect"  # no new work; it will be ready or dead soon
    DEAD = "dead"  # will be started again
    QUARANTINED = "quarantined"


class Said(enum.Enum):
    """What a process that answers says about itself."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What must outlive the coordinator: times of crashes by the same clock, and what was asked for."""

    crashes: tuple[float, ...] = ()
    starts: int = 0  # of the life that the last crash ended
    quarantined: bool = False
    drained: bool = False
    returns: bool = False  # it was drained for a restart, which is to be finished


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


class _Life(enum.Enum):
    UNBORN = enum.auto()  # nobody has started it yet
    UNHEARD = enum.auto()  # runs, has not answered
    HEARD = enum.auto()
    SUSPECT = enum.auto()
    DEAD = enum.auto()
    QUARANTINED = enum.auto()
    STOPPED = enum.auto()  # on request


_FINAL = {_Life.SUSPECT: Phase.SUSPECT, _Life.DEAD: Phase.DEAD, _Life.QUARANTINED: Phase.QUARANTINED}
_ANSWERING = (_Life.UNHEARD, _Life.HEARD, _Life.SUSPECT)


@dataclass(slots=True)
class _Process:
    backoff: Backoff
    life: _Life = _Life.UNBORN
    said: Said = Said.READY
    drained: bool = False  # on request
    returns: bool = False  # it is being restarted: stopped, it is started again
    starts: int = 0
    pid: int = 0
    since: float = 0.0  # start of this life
    alive_at: float = 0.0  # last sign of life
    step_at: float | None = None  # last progress of the step that runs; None: no step runs
    step_p99_s: float = 0.0
    start_at: float = 0.0  # while dead: when the backoff is over
    asked: bool = False  # an action was handed out and its effect not yet seen
    crashes: list[float] = field(default_factory=list)
    crashed_starts: int = 0  # of the life that the last of them ended


class Fleet:
    """All processes but the coordinator."""

    def __init__(self, fleet_limits: FleetLimits = FleetLimits()) -> None:
        self.limits = fleet_limits
        self._answering: Set[str] = frozenset()
        self._processes: dict[str, _Process] = {}
        self._remembered: dict[str, Remembered] = {}  # of processes that were not seen yet
        self._ticked_at: float | None = None
        self._may_answer_from: float | None = -math.inf  # lanes wait for the owner before they answer

    def observe(self, seen: Mapping[str, Observed], answering: Set[str], now: float) -> None:
        """Take over a snapshot of the supervisor; `answering` names those that give signs of life (the lanes)."""
        self._answering = answering
        for gone in self._processes.keys() - seen.keys():
            del self._processes[gone]
        for name, process in seen.items():
            known = self._processes.get(name) or self._meet(name, process)
            if process.running:
                if process.starts != known.starts:
                    self._began(known, process, now)
            elif process.exit_code is None:
                self._stopped(known, process, now)
            elif process.starts != known.starts or known.life not in (_Life.DEAD, _Life.QUARANTINED):
                self._crashed(name, known, process, now)

    def answered(self, name: str, now: float, step: Progress | None = None, said: Said = Said.READY) -> None:
        """A sign of life from the process that runs now, and how far its step is, if one runs."""
        process = self._processes.get(name)
        if process is not None and process.life in _ANSWERING:
            process.alive_at, process.said = now, said
            process.step_at, process.step_p99_s = (now - step.still_s, step.p99_s) if step else (None, 0.0)
            stuck = self._stuck_s(process, now) >= self._suspect_s(process)
            process.life = _Life.SUSPECT if stuck else _Life.HEARD

    def suspected(self, name: str) -> None:
        """Its connection broke or somebody had a bad answer: no new work until the next sign of life."""
        process = self._processes.get(name)
        if process is not None and process.life is _Life.HEARD:
            process.life = _Life.SUSPECT

    def owner_ready(self, ready: bool, now: float) -> None:
        """Whether the region can be had: lanes do not answer before, and are given no time for it."""
        if not ready:
            self._may_answer_from = None
        elif self._may_answer_from is None:
            self._may_answer_from = now

    def drain(self, name: str, *, returns: bool = False) -> None:
        """No new work from now on; `returns`: for a restart. KeyError for an unknown name."""
        process = self._processes[name]
        process.drained, process.returns = True, returns

    def returns(self, name: str) -> bool:
        """Whether it is being restarted, so that requests may wait for it."""
        process = self._processes.get(name)
        return process is not None and process.returns

    def undrain(self, name: str, now: float) -> None:
        """Back into service, also out of quarantine and after a stop, and now. KeyError for an unknown name."""
        process = self._processes[name]
        process.drained = process.returns = False
        if process.life in (_Life.QUARANTINED, _Life.STOPPED, _Life.UNBORN):
            process.life, process.asked = _Life.DEAD, False
            process.crashes.clear()
        if process.life is _Life.DEAD:  # whoever says so knows why it died: no wait before the next start
            process.start_at, process.backoff = now, Backoff(self.limits)

    def remember(self) -> dict[str, Remembered]:
        """What the next fleet must know of each process that is not simply well."""
        found = {
            name: Remembered(
                tuple(process.crashes),
                process.crashed_starts,
                process.life is _Life.QUARANTINED,
                process.drained and not process.returns,
                process.returns,
            )
            for name, process in self._processes.items()
        }
        told = (self._remembered | found).items()
        return {name: each for name, each in told if each != Remembered(starts=each.starts)}

    def recall(self, remembered: Mapping[str, Remembered]) -> None:
        """What the fleet before this one knew; before anything was observed."""
        self._remembered = dict(remembered)

    def tick(self, now: float) -> list[Action]:
        """Let time pass; every action is handed out once."""
        if self._ticked_at is not None and now - self._ticked_at >= self.limits.own_stall_s:
            for process in self._processes.values():  # it was us who slept: their silence says nothing
                process.alive_at = now
                process.step_at = None if process.step_at is None else now
        self._ticked_at = now
        actions: list[Action] = []
        for name, process in self._processes.items():
            if process.life is _Life.DEAD:
                if now >= process.start_at and not process.asked:
                    process.asked = True
                    actions.append(Start(name))
            elif name in self._answering and process.life is _Life.UNHEARD:
                if self._unheard_s(name, process, now) >= self.limits.start_s and not process.asked:
                    process.asked = True
                    actions.append(Kill(name, "it does not become ready"))
            elif name in self._answering and process.life in (_Life.HEARD, _Life.SUSPECT):
                silent_s, stuck_s = now - process.alive_at, self._stuck_s(process, now)
                if silent_s >= self.limits.suspect_after_s or stuck_s >= self._suspect_s(process):
                    process.life = _Life.SUSPECT
                silent = silent_s >= self.limits.kill_after_s
                if (silent or stuck_s >= self._kill_s(process)) and not process.asked:
                    process.asked = True
                    actions.append(Kill(name) if silent else Kill(name, "its step stands still"))
        return actions

    def _unheard_s(self, name: str, process: _Process, now: float) -> float:
        if name == OWNER:
            return now - process.alive_at
        return 0.0 if self._may_answer_from is None else now - max(process.alive_at, self._may_answer_from)

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
        if isinstance(action, Start) and process.life is _Life.DEAD:
            process.start_at = now + self.limits.backoff_max_s

    def phase(self, name: str) -> Phase:
        """Where the process is; STARTING when nobody has said anything about it."""
        process = self._processes.get(name)
        if process is None or process.life is _Life.UNBORN:
            return Phase.STARTING
        if process.life is _Life.STOPPED:
            return Phase.DRAINING
        if process.life in _FINAL:
            return _FINAL[process.life]
        if process.drained or process.said is Said.DRAINING:
            return Phase.DRAINING
        if process.life is _Life.UNHEARD:
            return Phase.STARTING
        return Phase.WARMING if process.said is Said.WARMING else Phase.READY

    def restarts(self, name: str) -> int:
        """How often it was started again."""
        process = self._processes.get(name)
        return 0 if process is None else max(0, process.starts - 1)

    def pid(self, name: str) -> int:
        """Its process id, 0 while it does not run."""
        process = self._processes.get(name)
        return 0 if process is None else process.pid

    def _meet(self, name: str, seen: Observed) -> _Process:
        process = self._processes[name] = _Process(Backoff(self.limits))
        known = self._remembered.pop(name, Remembered())
        process.drained, process.returns = known.drained, known.returns
        process.crashes, process.crashed_starts = list(known.crashes), known.starts
        if not seen.running and seen.exit_code is not None and known.starts == seen.starts:  # this crash was counted
            quarantined = known.quarantined and name != OWNER
            process.life, process.starts = _Life.QUARANTINED if quarantined else _Life.DEAD, seen.starts
        return process

    def _began(self, process: _Process, seen: Observed, now: float) -> None:
        process.life, process.said, process.asked = _Life.UNHEARD, Said.READY, False
        if process.starts:  # else a fleet that has just begun sees it for the first time
            process.returns = process.returns and process.drained
        process.starts, process.pid = seen.starts, seen.pid
        process.since = process.alive_at = now
        process.step_at, process.step_p99_s = None, 0.0

    def _stopped(self, process: _Process, seen: Observed, now: float) -> None:
        to_be_started = process.life is _Life.DEAD and process.starts == seen.starts  # by an undrain
        if not to_be_started:
            unfinished = process.returns and not process.drained  # the coordinator that began a restart is no more
            process.life = _Life.DEAD if unfinished else _Life.STOPPED if seen.starts else _Life.UNBORN
            process.start_at, process.asked = now, False
        process.starts, process.pid = seen.starts, 0

    def _crashed(self, name: str, process: _Process, seen: Observed, now: float) -> None:
        # A fleet that has just begun sees processes that died before it: their life is unknown, so it counts as none.
        life_s = now - process.since if process.starts == seen.starts else 0.0
        process.starts = process.crashed_starts = seen.starts
        process.pid, process.asked = 0, False
        process.returns = process.returns and process.drained
        process.crashes = [at for at in process.crashes if now - at < self.limits.crash_window_s] + [now]
        if name != OWNER and len(process.crashes) >= self.limits.crashes_to_quarantine:
            process.life = _Life.QUARANTINED
        else:
            process.life = _Life.DEAD
            process.start_at = now + process.backoff.after_life_of(life_s)
