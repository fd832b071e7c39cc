"""Which processes a cluster has and with what command lines. Pure but for `plan_added`, which asks for free memory.

Not here: starting them (supervisor, launchers). Invariant: the environment of a process is this one's without what
would make it see other modules, another cluster's Ray, or a GPU that it must not touch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coordinator.config import AUTO, PARK_AUTO, ServeConfig
from coordinator.cores import Layout, layout
from coordinator.errors import BadOption
from coordinator.fleet.states import OWNER
from coordinator.host.lane_options import LaneOptions
from coordinator.host.room import check_one_more, free_here
from coordinator.host.rundir import RunDir, regions_path
from coordinator.host.supervisor import COORDINATOR, Managed
from coordinator.launchers.base import ProcessSpec, module_argv
from coordinator.pack_facts import PackFacts


def plan_cluster(config: ServeConfig, run_dir: RunDir, cores: Layout, env: Mapping[str, str]) -> list[Managed]:
    """Owner, lanes, coordinator, in the order in which they start."""
    pack, log_json = config.lane.pack, config.lane.log_json
    coordinator = module_argv(
        "coordinator",
        *("--supervisor", f"unix:{run_dir.socket('supervisor')}"),
        *("--pack", str(pack)),
        *("--http", str(config.http)),
        *("--grpc", str(config.grpc)),
        *("--owner", str(run_dir.socket(OWNER))),
        *(("--page", str(config.page)) if config.page else ()),
        *(("--trace-requests", str(config.trace_requests)) if config.trace_requests else ()),
        *(("--otlp", config.otlp) if config.otlp else ()),
        *(("--tenants", str(config.tenants)) if config.tenants else ()),
        *(("--tls-cert", str(config.tls.certificate), "--tls-key", str(config.tls.key)) if config.tls else ()),
        *(("--join-at", str(config.hosts.address)) if config.hosts else ()),
        *(("--identity", str(config.hosts.identity)) if config.hosts else ()),
        *(word for each in config.lane.alike().items() if config.hosts for word in ("--alike", "=".join(each))),
        *("--drain-s", str(config.drain_s)),
        *(("--log-json",) if log_json else ()),
    )
    return [
        *plan_host(config.lane, config.park_bytes, config.park_disk_bytes, run_dir, cores.lanes, env),
        Managed(
            ProcessSpec(COORDINATOR, coordinator, child_env(env, gpu=False), run_dir.log(COORDINATOR), cores.doors),
            ping=f"unix:{run_dir.socket(COORDINATOR)}",
        ),
    ]


def plan_host(
    options: LaneOptions,
    park_bytes: int,
    park_disk_bytes: int,
    run_dir: RunDir,
    cores: Sequence[tuple[int, ...]],
    env: Mapping[str, str],
) -> list[Managed]:
    """Owner and lanes, one for each of `cores`: all that a host of another one's cluster has."""
    owner = plan_owner(
        options.pack,
        run_dir,
        env,
        log_json=options.log_json,
        park_bytes=park_bytes,
        park_disk_bytes=park_disk_bytes,
    )
    park = park_bytes != 0
    return [owner, *(plan_lane(options, number, run_dir, own, env, park=park) for number, own in enumerate(cores))]


def plan_owner(
    pack: Path,
    run_dir: RunDir,
    env: Mapping[str, str],
    *,
    log_json: bool,
    park_bytes: int = 0,
    park_disk_bytes: int = 0,
) -> Managed:
    """The region owner of this host."""
    argv = module_argv(
        "shared_experts",
        "own",
        "--pack",
        str(pack),
        "--run-dir",
        str(run_dir.path),
        "--regions",
        str(regions_path(env)),
        *(("--park", AUTO if park_bytes == PARK_AUTO else str(park_bytes)) if park_bytes else ()),
        *(("--park-disk", str(run_dir.log_dir.parent / "park")) if park_disk_bytes else ()),
        *(("--park-disk-bytes", str(park_disk_bytes)) if park_disk_bytes else ()),
        *(("--log-json",) if log_json else ()),
    )
    return Managed(ProcessSpec(OWNER, argv, child_env(env, gpu=False), run_dir.log(OWNER)))


def plan_lane(
    options: LaneOptions,
    number: int,
    run_dir: RunDir,
    cores: tuple[int, ...],
    env: Mapping[str, str],
    *,
    park: bool = False,
) -> Managed:
    """Lane `number`; on a machine with GPUs it sees its own one alone, under the number 0."""
    name = f"lane-{number}"
    address = f"unix:{run_dir.socket(name)}"
    argv = module_argv(
        "lanes",
        *("--owner", str(run_dir.socket("owner"))),
        *("--listen", address),
        *("--cores", ",".join(map(str, cores))),
        *("--name", name),
        *("--region-socket", str(run_dir.socket(f"{name}.region"))),
        *("--profiles", str(run_dir.log_dir.parent / "profiles")),
        *(("--park", str(run_dir.socket("park"))) if park else ()),
        *options.argv(),
    )
    on_gpu = options.device == "cuda"
    lane_env = child_env(env, gpu=on_gpu)
    if on_gpu:
        visible = [gpu for gpu in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if visible and number >= len(visible):
            raise BadOption(f"{name} needs a GPU of its own, but only {len(visible)} GPUs are visible")
        lane_env["CUDA_VISIBLE_DEVICES"] = visible[number] if visible else str(number)
    return Managed(ProcessSpec(name, argv, lane_env, run_dir.log(name), cores), address)


def plan_added(
    number: int,
    *,
    options: LaneOptions,
    allowed: Sequence[int],
    run_dir: RunDir,
    env: Mapping[str, str],
    park: bool,
    facts: PackFacts | None = None,
) -> Managed:
    """One lane more than there were: its part of all `allowed` cores; those of the others stay as they are.

    BadOption where the host's memory does not hold it; without `facts` nobody asks.
    """
    if facts is not None:
        check_one_more(facts, options, free_here())
    cores = layout(allowed, number + 1, gpu=options.device == "cuda")
    return plan_lane(options, number, run_dir, cores.lanes[number], env, park=park)


def lane_adder(
    options: LaneOptions, park_bytes: int | None, facts: PackFacts | None, allowed: Sequence[int], run_dir: RunDir,
    env: Mapping[str, str],
) -> Callable[[int], Managed]:  # fmt: skip
    """`plan_added` by number alone: what a supervisor plans lanes with."""
    return functools.partial(
        plan_added, options=options, allowed=allowed, run_dir=run_dir, env=env, park=park_bytes != 0, facts=facts
    )


def child_env(env: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """The environment of a process of the cluster."""
    kept = {key: value for key, value in env.items() if not key.startswith("RAY_") and key != "PYTHONSTARTUP"}
    kept["PYTHONUNBUFFERED"] = "1"  # a log ends with what the process said last
    if not gpu:
        kept["CUDA_VISIBLE_DEVICES"] = ""  # Ray no longer blanks it for processes without a GPU
    return kept
