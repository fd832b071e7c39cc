"""The snapshot as a function: every key always there, plain JSON, bounded, true to the moment."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import limits
from coordinator.fleet.lane_view import LaneView, RegionView, StepTimes
from coordinator.host.owner_status import OwnerStatus
from coordinator.page.changes import Change
from coordinator.page.history import Sample
from coordinator.page.snapshot import ANSWERED, Moment, snapshot
from coordinator.policy.kept import Kept
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.journal import FirstToken
from coordinator.telemetry.lane_totals import FIELDS
from coordinator.telemetry.request_record import RequestRecord
from tests.unit.test_metrics import MODEL, OWNER

ROOT = Path(__file__).parents[2]
EMPTY = State([], {}, {}, 0, 256, None, None, 0)


def moment(**changes):
    base = Moment(1000.0, 1.7e9, 900.0, "0.1", EMPTY, (), (), (), (), (), {}, {})
    return replace(base, **changes)


def lane(name="lane-0", state="ready", **fields):
    return LaneView(name, "", state, b"i", MODEL, pid=7, device="cpu", **fields)


def state(*lanes, **fields):
    totals = {each.name: dict.fromkeys(FIELDS, 0) for each in lanes}
    return replace(EMPTY, lanes=lanes, totals=totals, model=MODEL, owner=OWNER, **fields)


def record(number=0, queued_s=990.0, **fields):
    return RequestRecord(f"r{number}", "http", "anyone", "agent", 10, 100, queued_s, **fields)


def shape(value):
    """Keys and kinds, without values."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value[:1]] if isinstance(value, list) else type(value).__name__


def test_nothing_known_has_every_key_all_the_same():
    nothing, much = snapshot(moment()), snapshot(full())
    assert nothing.keys() == much.keys()
    assert nothing["totals"].keys() == much["totals"].keys()
    assert nothing["model"] is None
    assert nothing["region"]["state"] == "no answer"
    assert nothing["queue"] == {"waiting": 0, "limit": 256, "groups": [], "more": 0}


def test_the_regions_of_all_hosts_the_own_one_as_it_is_now():
    filling = OwnerStatus("filling", 30, 100)
    regions = (RegionView("", None, 2), RegionView("b", filling, 1), RegionView("c", None, 0))
    found = snapshot(moment(state=state(lane(), regions=regions, owner_restarts=2)))
    assert found["regions"] == [
        {"host": "", **found["region"]},
        {"host": "b", "state": "filling", "bytes": 100, "filled_bytes": 30, "owner_restarts": 1},
        {"host": "c", "state": "no answer", "bytes": 0, "filled_bytes": 0, "owner_restarts": 0},
    ]
    assert found["region"]["state"] == OWNER.state


KEPT = Kept("ann", "agent", 970.0, 200, {"lane-1": 200, "lane-0": 128}, 192)


def full():
    lanes = (
        lane(steps=(StepTimes("decode", 5, 0.02),), resident_sequences=3, cached_experts=(0, 4, 6), layer_experts=8),
        lane("lane-1", "dead", restarts=2),
    )
    seen = [
        Sample(999.0 - 4 + k * 4, {"lane-0": {
            ANSWERED: 100 * k, "prompt_tokens": 30 * k, "reused_tokens": 10 * k, "expert_hits": 9 * k,
            "expert_misses": k, "expert_hit_bytes": 4000 * k, "expert_miss_bytes": 400 * k, "ngram_cache_hits": 2 * k,
            "ngram_prefetch_hits": k, "ngram_waited": k, "ngram_read_bytes": 40 * k,
            "drafts_right": 4 * k, "drafts_wrong": k,
        }}) for k in range(2)
    ]  # fmt: skip
    running = record(1, begun_s=991.0, first_token_s=992.0, tokens=25, lanes=[("lane-0", 0)])
    orphan = record(2, begun_s=991.0, tokens=5, lanes=[("lane-1", 0)])
    failed = record(4, ended_s=995.0, outcome="lane_lost", lanes=[("lane-1", 0)], tokens=8)
    return moment(
        state=state(*lanes, queued=2, running={"lane-0": 1, "lane-1": 0}, owner_restarts=1, conversations=(KEPT,)),
        samples=seen, living=(running, orphan, record(3, 996.0)), failures=(failed,),
        first_tokens=(FirstToken(990.0, "lane-0", 4.0), FirstToken(100.0, "lane-0", 50.0)),
        changes=(Change(994.0, "lane-1", "ready", "dead"),), since_s={"lane-1": 6.0},
        outcomes={"length": 7, "stop": 1, "cancelled": 2, "lane_lost": 1, "queue_full": 3},
    )  # fmt: skip


def test_what_it_says_is_the_moment():
    now = snapshot(full())
    assert now["totals"] == {
        "lanes": 2, "lanes_serving": 1, "running": 1, "waiting": 2, "tokens_per_s": 25.0, "prompt_tokens_per_s": 7.5,
        "first_token_s": 3.0, "answers": 8, "cancelled": 2, "refused": 3, "failed": 1,
    }  # fmt: skip
    first, second = now["lanes"]
    assert (first["state"], second["state"], second["state_s"], second["restarts"]) == ("busy", "dead", 6.0, 2)
    assert first["tokens_per_s_curve"] == [25.0]
    assert first["first_token_s"] == 3.0  # the median of 4 (ended) and 2 (running); what is long ago does not count
    assert second["first_token_s"] is None
    assert first["expert_share"] == {"cache": 0.9, "region": 0.1}
    assert first["ngram_share"] == {"cache": 0.5, "ahead": 0.25, "disk": 0.25}
    assert first["prompt_share"] == {"reused": 0.25, "read": 0.75}
    assert first["draft_share"] == {"right": 0.8, "wrong": 0.2}
    assert first["bytes_per_s"] == {"cache": 1000, "region": 100, "disk": 10}
    assert first["steps"] == {"decode": {"count": 5, "p99_s": 0.02}}
    assert first["conversations"]["resident"] == 3
    assert (first["cache"]["layers"], second["cache"]["layers"]) == ([0, 0.5, 0.75], [])
    assert now["conversations"] == [
        {"tenant": "ann", "session": "agent", "asked_s": 30.0, "prompt_tokens": 200,
         "lane_tokens": {"lane-0": 128, "lane-1": 200}, "parked_tokens": 192}
    ]  # fmt: skip
    assert first["work"] == [
        {"id": "r1", "tenant": "anyone", "session": "agent", "phase": "writing", "prompt_tokens": 10, "tokens": 25,
         "max_tokens": 100, "age_s": 10.0, "lanes_lost": 0}
    ]  # fmt: skip
    # what a dead lane had waits for another one
    assert second["work"] == []
    assert now["queue"]["groups"] == [
        {"tenant": "anyone", "session": "agent", "requests": 2, "prompt_tokens": 20, "longest_s": 10.0}
    ]
    assert now["errors"]["counts"] == {"lane_lost": 1, "queue_full": 3}
    assert now["errors"]["latest"][0]["code"] == "lane_lost"
    assert now["changes"] == [{"ago_s": 6.0, "lane": "lane-1", "before": "ready", "after": "dead"}]


def test_a_dead_lane_has_no_rate():
    for lane_state, pace in (("ready", 25.0), ("suspect", 25.0), ("dead", 0.0), ("quarantined", 0.0)):
        now = snapshot(replace(full(), state=state(lane(state=lane_state))))
        assert (now["totals"]["tokens_per_s"], now["lanes"][0]["tokens_per_s"]) == (pace, pace)


def test_it_is_plain_json_and_says_nothing_of_the_text():
    text = json.dumps(snapshot(full()), allow_nan=False)
    assert json.loads(text) == snapshot(full())


def test_states_of_work():
    for tokens, first, phase in ((0, None, "reading"), (1, 999.0, "writing")):
        living = (record(begun_s=991.0, first_token_s=first, tokens=tokens, lanes=[("lane-0", 0)]),)
        work = snapshot(moment(state=state(lane()), living=living))["lanes"][0]["work"]
        assert work[0]["phase"] == phase
    moved = record(begun_s=991.0, lanes=[("lane-1", 0), ("lane-0", 4)], tokens=6)
    assert snapshot(moment(state=state(lane()), living=(moved,)))["lanes"][0]["work"][0]["lanes_lost"] == 1


@pytest.mark.parametrize("more", [0, 1])
def test_rows_of_the_queue_are_bounded_and_the_rest_is_counted(more):
    waiting = [
        RequestRecord(f"{k}", "http", f"t{k}", "s", 1, 1, 10.0 + k) for k in range(limits.PAGE_QUEUE_ROWS + more)
    ]
    queue = snapshot(moment(living=waiting))["queue"]
    assert (len(queue["groups"]), queue["more"]) == (limits.PAGE_QUEUE_ROWS, more)
    assert queue["groups"][0]["tenant"] == "t0"
    # on a lane too
    for each in waiting:
        each.lanes.append(("lane-0", 0))
    assert len(snapshot(moment(state=state(lane()), living=waiting))["lanes"][0]["work"]) == limits.PAGE_QUEUE_ROWS


@pytest.mark.parametrize("more", [0, 1])
def test_long_names_are_cut(more):
    waiting = RequestRecord("0", "http", "t", "s" * (limits.PAGE_NAME_CHARS + more), 1, 1, 10.0)
    name = snapshot(moment(living=[waiting]))["queue"]["groups"][0]["session"]
    assert len(name) == limits.PAGE_NAME_CHARS
    assert name.endswith("…") == bool(more)


@pytest.mark.parametrize("more", [0, 1])
def test_cells_of_a_cache_map_are_bounded(more):
    wide = lane(cached_experts=(1,) * (limits.PAGE_LAYERS + more), layer_experts=4)
    assert snapshot(moment(state=state(wide)))["lanes"][0]["cache"]["layers"] == [0.25] * limits.PAGE_LAYERS


def test_a_clock_that_is_behind_harms_nothing():
    now = snapshot(replace(full(), now_s=10.0))
    assert now["lanes"][0]["work"][0]["age_s"] == 0


def test_the_guide_names_every_key():
    guide = (ROOT / "docs" / "page.md").read_text()
    told = set(re.findall(r"`(\w+)`", guide))

    def keys(value):
        for key, each in value.items():
            yield key
            for inner in each if isinstance(each, list) else [each]:
                if isinstance(inner, dict) and key not in ("counts", "steps", "lane_tokens"):
                    yield from keys(inner)

    assert set(keys(snapshot(full()))) - told == set()
