"""Between the engine's values and lane.proto's messages: pure translation, no wire, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from laneproto.v1 import lane_pb2 as pb
from lanes.counters import Counters
from lanes.engine import Status
from lanes.experts.cache import Cached
from lanes.outbox import End, Token
from lanes.state.prefixes import News, Place, PrefixLog

_STATES = {
    "ready": pb.LANE_STATE_READY,
    "busy": pb.LANE_STATE_BUSY,
    "draining": pb.LANE_STATE_DRAINING,
}
_KINDS = {
    "prefill": pb.STEP_KIND_PREFILL,
    "decode": pb.STEP_KIND_DECODE,
    "between": pb.STEP_KIND_BETWEEN,
}
_PLACES = {Place.LIVE: pb.PREFIX_PLACE_LIVE, Place.PARKED: pb.PREFIX_PLACE_PARKED}
_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "error": pb.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this lane is and what it serves; fixed for the life of the process."""

    name: str
    incarnation: bytes
    pid: int
    device: str
    model_name: str
    architecture: str
    fingerprint: bytes
    vocab_size: int
    context_tokens: int
    eos_ids: tuple[int, ...]
    expert_format: str
    region_bytes: int
    visitor_tokens: int = 0
    approximations: tuple[str, ...] = ()  # what every answer is labelled with


def hello_reply(identity: Identity, status: pb.LaneStatus, protocol_version: int) -> pb.HelloReply:
    """The answer to Hello."""
    return pb.HelloReply(
        protocol_version=protocol_version,
        lane=identity.name,
        incarnation=identity.incarnation,
        pid=identity.pid,
        device=identity.device,
        model=pb.ModelInfo(
            name=identity.model_name,
            architecture=identity.architecture,
            fingerprint=identity.fingerprint,
            vocab_size=identity.vocab_size,
            context_tokens=identity.context_tokens,
            eos_ids=identity.eos_ids,
            expert_format=identity.expert_format,
            region_bytes=identity.region_bytes,
            max_output_tokens=identity.context_tokens - 1,
            visitor_tokens=identity.visitor_tokens,
        ),
        status=status,
    )


def prefix_event(news: News) -> pb.PrefixEvent:
    """What Prefixes sends."""
    return pb.PrefixEvent(
        sequence=news.sequence,
        snapshot=news.snapshot,
        complete=news.complete,
        added=[pb.Prefix(chain=chain, tokens=tokens, place=_PLACES[place]) for (chain, tokens), place in news.added],
        removed=[pb.Prefix(chain=chain, tokens=tokens) for chain, tokens in news.removed],
    )


def lane_status(status: Status, stamp_ns: int, prefixes: PrefixLog, cached: Cached) -> pb.LaneStatus:
    """What Watch sends."""
    return pb.LaneStatus(
        state=_STATES[status.state],
        counters=_counters(status.counters),
        active_request_id=status.request_ids[0] if status.request_ids else "",
        request_ids=status.request_ids,
        stamp_ns=stamp_ns,
        resident_sequences=prefixes.residents,
        prefix_sequence=prefixes.sequence,
        cached_experts=cached.by_layer,
        layer_experts=cached.layer_experts,
        step=_step(status),
        step_times=[
            pb.StepTimes(kind=_KINDS[times.kind], count=times.count, p99_ns=times.p99_ns) for times in status.step_times
        ],
        decode_times=[
            pb.DecodeTimes(rows=rows, windows=mean.count, mean_ns=round(mean.value))
            for rows, mean in enumerate(status.windows_ns, 1)
            if mean.count
        ],
    )


def _step(status: Status) -> pb.RunningStep | None:
    step = status.step
    if step is None:
        return None
    p99_ns = next((times.p99_ns for times in status.step_times if times.kind == step.kind), 0)
    return pb.RunningStep(
        kind=_KINDS[step.kind], started_ns=step.started_ns, progress_ns=step.progress_ns, p99_ns=p99_ns
    )


def token_chunk(tokens: Sequence[Token]) -> pb.GenerateEvent:
    """Tokens in the order they were chosen."""
    return pb.GenerateEvent(tokens=pb.TokenChunk(tokens=[_token(token) for token in tokens]))


def finished(end: End, approximations: Sequence[str] = ()) -> pb.GenerateEvent:
    """The last event of a stream."""
    return pb.GenerateEvent(
        finished=pb.Finished(
            reason=_REASONS[end.reason],
            usage=pb.Usage(
                prompt_tokens=end.prompt_tokens,
                cached_tokens=end.cached_tokens,
                completion_tokens=end.completion_tokens,
                restored_tokens=end.restored_tokens,
                waited_windows=end.waited_windows,
                prompt_choices=end.counters.prompt_choices,
                replaced_choices=end.counters.replaced_choices,
                draft_tokens=end.counters.draft_tokens,
                accepted_draft_tokens=end.counters.right_draft_tokens,
                approximations=approximations,
            ),
            counters=_counters(end.counters),
            error_code=end.error_code,
            error_message=end.error_message,
        )
    )


def _token(token: Token) -> pb.Token:
    if token.logprobs is None:
        return pb.Token(id=token.id, stamp_ns=token.stamp_ns)
    return pb.Token(
        id=token.id,
        stamp_ns=token.stamp_ns,
        logprob=token.logprobs.chosen,
        top=[pb.TokenLogprob(id=i, logprob=value) for i, value in token.logprobs.top],
    )


def _counters(counters: Counters) -> pb.Counters:
    return pb.Counters(**asdict(counters))
