"""The command lines that the supervisor starts are ones that owner, lanes and coordinator really take."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

import coordinator.__main__ as coordinator_main
from coordinator.config import PARK_AUTO, Address, HostDoor, ServeConfig
from coordinator.cores import Layout
from coordinator.errors import BadOption
from coordinator.host.lane_options import LaneOptions
from coordinator.host.plan import child_env, plan_added, plan_cluster
from coordinator.host.room import Free
from coordinator.host.rundir import RunDir
from coordinator.pack_facts import PackFacts
from lanes.config import parse as parse_lane
from shared_experts.cli_own import own

TWO = Layout(((0,), (0,)), ())
ENV = {"PATH": "/bin", "HOME": "/h", "RAY_ADDRESS": "elsewhere", "PYTHONSTARTUP": "x.py", "CUDA_VISIBLE_DEVICES": "4,6"}


def config(**changes):
    base = ServeConfig(
        lane=LaneOptions(Path("/packs/one"), "cpu", 1 << 28), cluster="default", lanes=2, launcher="local",
        http=Address("127.0.0.1", 8000), grpc=Address(path="/run/g.sock"), page=Address("127.0.0.1", 8002),
        cores_per_lane=None, drain_s=10.0, start_timeout_s=60.0,
    )  # fmt: skip
    mine = {name: changes.pop(name) for name in tuple(changes) if hasattr(base, name)}
    return replace(base, lane=replace(base.lane, **changes), **mine)


EVERY_OPTION = {
    "context_tokens": 512, "prefill_chunk_tokens": 7, "state_budget_bytes": 1 << 21, "ngram_cache_bytes": 1 << 20,
    "drafts": 2, "draft_vocabulary": Path("/texts/code.json"), "trace_folder": Path("/traces"),
    "trace_requests": Path("/requests"), "log_json": True,
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(Path("/run/user/1/expressway/default"), tmp_path, -1)


def arguments(managed, module):
    argv = list(managed.spec.argv)
    assert argv[1:4] == ["-P", "-m", module]
    return argv[4:]


@pytest.mark.parametrize("changes", [{}, EVERY_OPTION])
def test_everybody_understands_what_is_asked(run_dir, changes):
    core = min(os.sched_getaffinity(0))
    wanted = config(**changes)
    owner, lane_0, lane_1, coordinator = plan_cluster(wanted, run_dir, Layout(((core,), (core,)), ()), ENV)
    assert [each.spec.name for each in (owner, lane_0, lane_1, coordinator)] == [
        "owner",
        "lane-0",
        "lane-1",
        "coordinator",
    ]

    lane = parse_lane(arguments(lane_1, "lanes"), {}, frozenset({core}))
    assert f"unix:{lane.listen}" == lane_1.address
    assert (lane.name, lane.pack, lane.cores, lane.vram_budget_bytes) == ("lane-1", wanted.lane.pack, (core,), 1 << 28)
    assert lane.owner == run_dir.path / "owner.sock"
    assert lane.region_socket.match("lane-*.region.sock")  # where a new owner looks
    assert (lane.context_tokens, lane.log_json) == (wanted.lane.context_tokens, wanted.lane.log_json)
    assert wanted.lane.prefill_chunk_tokens in (None, lane.prefill_chunk_rows)
    assert wanted.lane.state_budget_bytes in (None, lane.state_budget_bytes)
    assert wanted.lane.ngram_cache_bytes in (None, lane.ngram_cache_bytes)
    assert (lane.drafts, lane.draft_vocabulary) == (wanted.lane.drafts, wanted.lane.draft_vocabulary)
    assert lane.trace_routing == wanted.lane.trace_folder

    assert lane.park is None
    asked = own.make_context("own", arguments(owner, "shared_experts")[1:]).params
    assert (asked["pack_dir"], asked["run_dir"]) == (wanted.lane.pack, run_dir.path)
    asked = coordinator_main.command.make_context("coordinator", arguments(coordinator, "coordinator")).params
    assert (asked["http"], asked["grpc"], asked["drain_s"]) == ("127.0.0.1:8000", "unix:/run/g.sock", 10.0)
    assert asked["supervisor"] == f"unix:{run_dir.path}/supervisor.sock"
    assert (asked["page"], asked["owner"]) == ("127.0.0.1:8002", run_dir.path / "owner.sock")
    assert asked["trace_requests"] == wanted.trace_requests
    assert asked["alike"] == ()


def test_the_coordinator_knows_what_lanes_of_all_hosts_have_alike(run_dir):
    """Said or meant: what was not said is named by what it means, and equals the same said."""
    hosts = HostDoor(Address("10.0.0.1", 7443), Path("/ids/head.pem"))
    wanted = config(context_tokens=512, kv="int8", drafts=0, hosts=hosts)
    argv = arguments(plan_cluster(wanted, run_dir, TWO, ENV)[-1], "coordinator")
    asked = coordinator_main.command.make_context("coordinator", argv).params
    said = dict(map(coordinator_main._pair, asked["alike"]))
    assert said == wanted.lane.alike()
    assert said == {"--context": "512", "--kv": "int8", "--prefill-routing": "exact", "--drafts": "0"}
    assert config(kv="exact", prefill_routing="exact").lane.alike() == config().lane.alike()
    assert {config(**each).lane.alike()["--drafts"] for each in ({}, {"drafts": 3})} == {"the pack's", "3"}


def test_a_lane_that_is_added_gets_its_part_of_the_cores(run_dir):
    added = plan_added(2, options=config().lane, allowed=range(6), run_dir=run_dir, env=ENV, park=True)
    lane = parse_lane(arguments(added, "lanes"), {}, frozenset(range(6)))
    assert (lane.name, lane.cores) == ("lane-2", (4, 5))
    assert lane.park is not None


def test_a_lane_that_the_memory_does_not_hold_is_not_added(run_dir, monkeypatch):
    facts = PackFacts(None, None, 1, dense_fp32_bytes=1 << 30)
    asked = {
        "options": config().lane,
        "allowed": range(6),
        "run_dir": run_dir,
        "env": ENV,
        "park": True,
        "facts": facts,
    }
    monkeypatch.setattr("coordinator.host.plan.free_here", lambda: Free(2 << 30))
    assert plan_added(2, **asked).spec.name == "lane-2"
    monkeypatch.setattr("coordinator.host.plan.free_here", lambda: Free(1 << 30))
    with pytest.raises(BadOption, match="one more lane"):
        plan_added(2, **asked)


def test_the_coordinator_keeps_to_cores_that_no_lane_has(run_dir):
    layout = Layout(((0, 1), (2, 3)), (4, 5))
    owner, lane_0, lane_1, coordinator = plan_cluster(config(), run_dir, layout, ENV)
    assert [each.spec.cores for each in (owner, lane_0, lane_1, coordinator)] == [(), (0, 1), (2, 3), (4, 5)]


def test_owners_of_all_clusters_of_a_user_meet_in_one_place(run_dir):
    def regions(env):
        owner = plan_cluster(config(page=None), run_dir, TWO, env)[0]
        return str(own.make_context("own", arguments(owner, "shared_experts")[1:]).params["regions"])

    assert regions({"XDG_RUNTIME_DIR": "/run/user/1"}) == "/run/user/1/expressway/.regions"
    assert regions({"HOME": "/h"}) == "/h/.local/state/expressway/.regions"


def test_a_page_that_is_off_is_not_asked_for(run_dir):
    argv = plan_cluster(config(page=None), run_dir, TWO, ENV)[-1].spec.argv
    assert "--page" not in argv


def test_no_process_sees_another_cluster_or_a_gpu_that_is_not_its_own(run_dir):
    processes = plan_cluster(config(), run_dir, TWO, ENV)
    for process in processes:
        assert process.spec.env["CUDA_VISIBLE_DEVICES"] == ""
        assert not {"RAY_ADDRESS", "PYTHONSTARTUP"} & set(process.spec.env)
    owner, lane_0, lane_1, coordinator = plan_cluster(config(device="cuda"), run_dir, TWO, ENV)
    seen = [process.spec.env["CUDA_VISIBLE_DEVICES"] for process in (owner, lane_0, lane_1, coordinator)]
    assert seen == ["", "4", "6", ""]
    with pytest.raises(BadOption, match="2 GPUs are visible"):
        plan_cluster(config(device="cuda", lanes=3), run_dir, Layout(((0,),) * 3, ()), ENV)
    assert child_env({"A": "b"}, gpu=True) == {"A": "b", "PYTHONUNBUFFERED": "1"}


def test_with_a_park_pool_owner_and_lanes_meet_at_its_socket(run_dir):
    core = min(os.sched_getaffinity(0))
    owner, lane_0, lane_1, _ = plan_cluster(
        config(park_bytes=1 << 30, park_disk_bytes=1 << 31), run_dir, Layout(((core,), (core,)), ()), ENV
    )
    told = own.make_context("own", arguments(owner, "shared_experts")[1:]).params
    assert (told["park_bytes"], told["park_disk_bytes"]) == (1 << 30, 1 << 31)
    assert told["park_dir"] == run_dir.log_dir.parent / "park"
    for lane in (lane_0, lane_1):
        assert parse_lane(arguments(lane, "lanes"), {}, frozenset({core})).park == run_dir.path / "park.sock"
    owner, lane_0, *_ = plan_cluster(config(park_bytes=PARK_AUTO), run_dir, Layout(((core,), (core,)), ()), ENV)
    assert own.make_context("own", arguments(owner, "shared_experts")[1:]).params["park_bytes"] is None
    assert "--park" in lane_0.spec.argv
