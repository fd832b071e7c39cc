"""What the coordinator knows of a lane, and the seam between those who keep lanes and those who use them.

The fleet side implements `Roster`; the request side (doors, dispatch) only reads it. Everything here runs on one event
loop: `lanes()` is a snapshot, callbacks are plain functions called on that loop after the change.

Invariant: a lane is "ready" in a view only after its Hello was answered, so `model` and `incarnation` are then known.
A process that dies and returns has another incarnation. Whether a ready lane is busy is dispatch's knowledge, not the
view's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from coordinator.policy.rates import Counted
from laneproto.v1 import lane_pb2

if TYPE_CHECKING:
    from coordinator.fleet.lane_client import LaneClient
    from coordinator.host.owner_status import OwnerStatus

LaneState = Literal["starting", "warming", "ready", "draining", "suspect", "dead", "quarantined"]  # fleet.Phase

HOPEFUL_STATES: frozenset[str] = frozenset({"starting", "warming", "ready", "suspect", "dead"})


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a lane serves, as its Hello said."""

    name: str
    architecture: str
    fingerprint: bytes
    vocab_size: int
    context_tokens: int
    eos_ids: tuple[int, ...]
    expert_format: str
    region_bytes: int
    max_output_tokens: int
    visitor_tokens: int = 0  # of a request that interrupts another, prompt and output, at most

    @classmethod
    def of(cls, info: lane_pb2.ModelInfo) -> ModelView:
        """From the wire."""
        return cls(
            name=info.name,
            architecture=info.architecture,
            fingerprint=info.fingerprint,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_ids=tuple(info.eos_ids),
            expert_format=info.expert_format,
            region_bytes=info.region_bytes,
            max_output_tokens=info.max_output_tokens,
            visitor_tokens=info.visitor_tokens,
        )

    def to_wire(self) -> lane_pb2.ModelInfo:
        """For the wire."""
        return lane_pb2.ModelInfo(
            name=self.name,
            architecture=self.architecture,
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            eos_ids=self.eos_ids,
            expert_format=self.expert_format,
            region_bytes=self.region_bytes,
            max_output_tokens=self.max_output_tokens,
            visitor_tokens=self.visitor_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a lane's steps of one kind take."""

    kind: str  # "prefill", "decode", "between"
    count: int  # since its process started
    p99_s: float  # of about the last thousand


def step_times(status: lane_pb2.LaneStatus) -> tuple[StepTimes, ...]:
    """From the wire; kinds that this version does not know are left out."""
    names = {lane_pb2.STEP_KIND_PREFILL: "prefill", lane_pb2.STEP_KIND_DECODE: "decode",
             lane_pb2.STEP_KIND_BETWEEN: "between"}  # fmt: skip
    return tuple(
        StepTimes(names[each.kind], each.count, each.p99_ns / 1e9) for each in status.step_times if each.kind in names
    )


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane at one moment."""

    name: str  # "lane-0"
    address: str  # gRPC target: "unix:/..." or "host:port"
    state: LaneState
    incarnation: bytes = b""
    model: ModelView | None = None
    restarts: int = 0
    pid: int = 0
    returns: bool = False  # it is out of service for a restart: requests may wait for it
    device: str = ""
    counters: lane_pb2.Counters = field(default_factory=lane_pb2.Counters)  # of its process; never changed in place
    steps: tuple[StepTimes, ...] = ()
    resident_sequences: int = 0  # conversations in its own memory
    cached_experts: tuple[int, ...] = ()  # in its own cache, by layer
    layer_experts: int = 0  # of each layer
    decode_ns: tuple[tuple[int, int], ...] = ()  # recent mean of its decode windows, by rows


def is_hopeful(view: LaneView) -> bool:
    """Whether it serves now or may serve later without anybody's help: requests may wait for it."""
    return view.returns or view.state in HOPEFUL_STATES


def counted(counters: lane_pb2.Counters) -> Counted:
    """What a lane has done, as placement wants it."""
    return Counted(
        counters.prompt_tokens, counters.prefill_ns / 1e9, counters.generated_tokens, counters.decode_ns / 1e9
    )


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """What a lane's process remembers, or a change of it."""

    seat: Seat
    added: Sequence[Prefix]
    removed: Sequence[Prefix]
    anew: bool  # everything said before is void


@dataclass(frozen=True, slots=True)
class RegionView:
    """The region of one host, as its owner said last."""

    host: str  # empty: the coordinator's own
    owner: OwnerStatus | None  # None: it does not answer, or the host is away
    restarts: int


class Roster(Protocol):
    """The lanes that there are. The fleet side implements it."""

    def lanes(self) -> Sequence[LaneView]:
        """All lanes, in a stable order."""
        ...

    def client(self, name: str) -> LaneClient:
        """The client of a lane in `lanes()`; the roster owns and closes it. KeyError for a name that is not there."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` after every change of `lanes()`; the returned function ends the subscription."""
        ...

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        """`callback` with all that lanes say they remember, from now on; one listener, for as long as the roster."""
        ...

    def owner_restarts(self) -> int:
        """How often the region's owner was started again."""
        ...

    def regions(self) -> Sequence[RegionView]:
        """Of all hosts, the coordinator's own first."""
        ...

    def report_suspect(self, name: str) -> None:
        """The lane did not keep a promise (a cancel unconfirmed, a stream lost): look at it."""
        ...
