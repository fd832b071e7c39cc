"""The cluster at one moment as JSON: what the page and `expressway top` show. A pure function.

    Moment ──snapshot──▶ {"v", "time_s", "model", "region", "regions", "totals", "lanes", "queue", "parked",
                         "conversations", "errors", "changes"}

Not here: where a Moment comes from (live), how it looks (assets, cli.top). Invariants: plain JSON values only, every
key always there; bounded in size whatever the requests are; no text of a request. Units stand in the names, shares are
0 to 1. docs/page.md describes it field by field; a change that readers notice changes VERSION.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from coordinator import limits
from coordinator.errors import Refused, RequestError, codes_of
from coordinator.fleet.lane_view import LaneView
from coordinator.host.owner_status import OwnerStatus
from coordinator.page.changes import Change
from coordinator.page.history import Sample, curve, rate, share
from coordinator.policy.host_names import host_of
from coordinator.policy.kept import Kept
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.journal import FirstToken
from coordinator.telemetry.request_record import RequestRecord

VERSION: Final = 2
ANSWERED: Final = "answered_tokens"  # of a sample: tokens that came from the lane, as dispatch saw them
_REFUSED: Final = codes_of(RequestError, Refused)  # before anything was computed
_GONE: Final = frozenset({"dead", "quarantined"})
_HOLDING: Final = frozenset({"ready", "draining", "suspect"})  # a lane in another state has lost what it was given


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that is shown. Times are seconds of one monotonic clock, but `wall_s`."""

    now_s: float
    wall_s: float  # since 1970
    started_s: float
    server: str  # version
    state: State
    samples: Sequence[Sample]
    living: Sequence[RequestRecord]  # in order of arrival
    failures: Sequence[RequestRecord]
    first_tokens: Sequence[FirstToken]
    changes: Sequence[Change]
    since_s: Mapping[str, float]  # by lane: how long it has been in its state
    outcomes: Mapping[str, int]  # of ended requests


def snapshot(moment: Moment) -> dict[str, Any]:
    """The moment, ready for `json.dumps`."""
    state = moment.state
    holding = {lane.name for lane in state.lanes if lane.state in _HOLDING}
    work: dict[str, list[RequestRecord]] = {lane.name: [] for lane in state.lanes}
    waiting = []
    for record in moment.living:
        if record.lane in holding:
            work[record.lane].append(record)
        else:
            waiting.append(record)
    lanes = [_lane(moment, lane, work[lane.name]) for lane in state.lanes]
    failed = {code: count for code, count in moment.outcomes.items() if code not in ("stop", "length", "cancelled")}
    return {
        "v": VERSION,
        "time_s": round(moment.wall_s, 3),
        "up_s": round(moment.now_s - moment.started_s, 1),
        "server": moment.server,
        "model": _model(state),
        "region": _region(state.owner, state.owner_restarts),
        "regions": [
            {"host": region.host, **_region(region.owner if region.host else state.owner, region.restarts)}
            for region in state.regions
        ],
        "totals": {
            "lanes": len(lanes),
            "lanes_serving": sum(lane.state == "ready" for lane in state.lanes),
            "running": sum(state.running.values()),
            "waiting": state.queued,
            "tokens_per_s": round(sum(lane["tokens_per_s"] for lane in lanes), 1),
            "prompt_tokens_per_s": round(sum(lane["prompt_tokens_per_s"] for lane in lanes), 1),
            "first_token_s": _typical(moment, None),
            "answers": sum(moment.outcomes.get(each, 0) for each in ("stop", "length")),
            "cancelled": moment.outcomes.get("cancelled", 0),
            "refused": sum(count for code, count in failed.items() if code in _REFUSED),
            "failed": sum(count for code, count in failed.items() if code not in _REFUSED),
        },
        "lanes": lanes,
        "queue": _queue(moment, waiting),
        "parked": _parked(state),
        "conversations": [_conversation(moment, kept) for kept in state.conversations],
        "errors": {
            "counts": dict(sorted(failed.items())),
            "latest": [
                {"ago_s": _ago(moment, record.ended_s), "code": record.outcome, "lane": record.lane,
                 "tenant": record.tenant, "session": _name(record.session), "tokens": record.tokens}
                for record in reversed(moment.failures)
            ],
        },
        "changes": [
            {"ago_s": _ago(moment, change.at_s), "lane": change.lane, "before": change.before, "after": change.after}
            for change in reversed(moment.changes)
        ],
    }  # fmt: skip


def _lane(moment: Moment, lane: LaneView, work: Sequence[RequestRecord]) -> dict[str, Any]:
    totals, samples, name = moment.state.totals.get(lane.name, {}), moment.samples, lane.name
    experts = share(samples, name, ("expert_hits", "expert_misses"))
    ngrams = share(samples, name, ("ngram_cache_hits", "ngram_prefetch_hits", "ngram_waited"))
    prompts = share(samples, name, ("reused_tokens", "prompt_tokens"))
    drafts = share(samples, name, ("drafts_right", "drafts_wrong"))
    gone = lane.state in _GONE  # then what it did in the last seconds is no rate of now
    return {
        "name": name,
        "host": host_of(name),
        "state": "busy" if lane.state == "ready" and work else lane.state,
        "state_s": round(moment.since_s.get(name, 0.0), 1),
        "device": lane.device,
        "pid": lane.pid,
        "restarts": lane.restarts,
        "work": [_work(moment, record) for record in work[: limits.PAGE_QUEUE_ROWS]],
        "tokens_per_s": 0.0 if gone else round(rate(samples, name, ANSWERED), 1),
        "prompt_tokens_per_s": 0.0 if gone else round(rate(samples, name, "prompt_tokens"), 1),
        "tokens_per_s_curve": [round(each, 1) for each in curve(samples, name, ANSWERED)],
        "first_token_s": _typical(moment, name),
        "expert_share": {"cache": _share(experts["expert_hits"]), "region": _share(experts["expert_misses"])},
        "ngram_share": {
            "cache": _share(ngrams["ngram_cache_hits"]),
            "ahead": _share(ngrams["ngram_prefetch_hits"]),
            "disk": _share(ngrams["ngram_waited"]),
        },
        "prompt_share": {"reused": _share(prompts["reused_tokens"]), "read": _share(prompts["prompt_tokens"])},
        "draft_share": {"right": _share(drafts["drafts_right"]), "wrong": _share(drafts["drafts_wrong"])},
        "bytes_per_s": {
            "cache": round(rate(samples, name, "expert_hit_bytes")),
            "region": round(rate(samples, name, "expert_miss_bytes")),
            "disk": round(rate(samples, name, "ngram_read_bytes")),
        },
        "cache": {
            "used_bytes": totals.get("cache_used_bytes", 0),
            "budget_bytes": totals.get("cache_budget_bytes", 0),
            "admissions": totals.get("cache_admissions", 0),
            "evictions": totals.get("cache_evictions", 0),
            "layers": [_share(n / lane.layer_experts) for n in lane.cached_experts[: limits.PAGE_LAYERS]]
            if lane.layer_experts
            else [],
        },
        "conversations": {
            "resident": lane.resident_sequences,
            "used_bytes": totals.get("state_used_bytes", 0),
            "budget_bytes": totals.get("state_budget_bytes", 0),
        },
        "steps": {step.kind: {"count": step.count, "p99_s": round(step.p99_s, 6)} for step in lane.steps},
    }


def _work(moment: Moment, record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "tenant": record.tenant,
        "session": _name(record.session),
        "phase": "reading" if record.first_token_s is None else "writing",
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.tokens,
        "max_tokens": record.max_tokens,
        "age_s": _ago(moment, record.queued_s),
        "lanes_lost": max(0, len(record.lanes) - 1),
    }


def _queue(moment: Moment, waiting: Sequence[RequestRecord]) -> dict[str, Any]:
    """By tenant and session, who waits longest first. A request that lost its lane waits as well."""
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in waiting:
        groups.setdefault((record.tenant, record.session), []).append(record)
    shown = list(groups.items())[: limits.PAGE_QUEUE_ROWS]
    return {
        "waiting": moment.state.queued,
        "limit": moment.state.queue_limit,
        "groups": [
            {
                "tenant": tenant,
                "session": _name(session),
                "requests": len(records),
                "prompt_tokens": sum(record.prompt_tokens for record in records),
                "longest_s": _ago(moment, records[0].queued_s),
            }
            for (tenant, session), records in shown
        ],
        "more": sum(len(records) for records in groups.values()) - sum(len(records) for _, records in shown),
    }


def _conversation(moment: Moment, kept: Kept) -> dict[str, Any]:
    return {
        "tenant": kept.tenant,
        "session": _name(kept.session),
        "asked_s": _ago(moment, kept.asked_s),
        "prompt_tokens": kept.prompt_tokens,
        "lane_tokens": dict(sorted(kept.lane_tokens.items())),
        "parked_tokens": kept.parked_tokens,
    }


def _parked(state: State) -> dict[str, int]:
    def every_lanes(field: str) -> int:
        return sum(totals.get(field, 0) for totals in state.totals.values())

    return {
        "parks": every_lanes("parks"),
        "park_bytes": every_lanes("park_bytes"),
        "restores": every_lanes("restores"),
        "refused": every_lanes("restores_refused"),
        "reused_tokens": every_lanes("reused_tokens"),
        "checkpoints": every_lanes("checkpoints"),
        "resident": sum(lane.resident_sequences for lane in state.lanes),
    }


def _model(state: State) -> dict[str, Any] | None:
    if state.model is None:
        return None
    return {
        "name": state.model.name,
        "architecture": state.model.architecture,
        "expert_format": state.model.expert_format,
        "context_tokens": state.model.context_tokens,
    }


def _region(owner: OwnerStatus | None, restarts: int) -> dict[str, Any]:
    return {
        "state": owner.state if owner else "no answer",
        "bytes": owner.total_bytes if owner else 0,
        "filled_bytes": owner.done_bytes if owner else 0,
        "owner_restarts": restarts,
    }


def _typical(moment: Moment, lane: str | None) -> float | None:
    """The median of a lane's recent first tokens, those of living requests included; None when there is none."""
    since_s = moment.now_s - limits.PAGE_RECENT_S
    seconds = [
        first.seconds for first in moment.first_tokens if first.at_s >= since_s and lane in (None, first.lane)
    ] + [
        record.first_token_s - record.queued_s
        for record in moment.living
        if record.first_token_s is not None and record.lanes and lane in (None, record.lanes[0][0])
    ]
    return round(median(seconds), 4) if seconds else None


def _ago(moment: Moment, at_s: float | None) -> float:
    return 0.0 if at_s is None else round(max(0.0, moment.now_s - at_s), 1)


def _share(value: float) -> float:
    return round(value, 4)


def _name(session: str) -> str:
    return session if len(session) <= limits.PAGE_NAME_CHARS else session[: limits.PAGE_NAME_CHARS - 1] + "…"
