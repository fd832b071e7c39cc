"""The clusters of this user on this host: which run, who listens where, and what dead ones left.

Not here: one run directory (rundir), what a cluster says about itself (its doors). Invariant: a cluster counts as
running exactly while its supervisor holds its lock; only directories whose lock is free are ever cleared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.errors import RunDirError
from coordinator.host.rundir import RunDir, is_running, read_cluster, regions_path, run_path

CLUSTERS_MAX = 256
_ADDRESSES = ("http", "grpc", "page")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster whose supervisor lives. `content` is its cluster.json, {} in its first moments."""

    name: str
    content: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As `status` lists it."""
        shown = {key: self.content.get(key) for key in ("model", *_ADDRESSES, "pack", "run_dir")}
        return {"cluster": self.name, "ready": bool(self.content.get("ready")), **shown}


def running_clusters(env: Mapping[str, str] = os.environ) -> list[RunningCluster]:
    """All of them, by name."""
    found = []
    for name in _names(env):
        if is_running(name, env):
            content: Mapping[str, Any] = {}
            with contextlib.suppress(RunDirError):
                content = read_cluster(name, env)
            found.append(RunningCluster(name, content))
    return found


def the_cluster(named: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The one that was named, or the only one that runs. RunDirError when none does, or several: with their names."""
    if named is not None:
        return named
    names = [each.name for each in running_clusters(env)]
    if not names:
        raise RunDirError("no cluster runs here")
    if len(names) > 1:
        raise RunDirError(f"several clusters run here ({', '.join(names)}): name one with --cluster")
    return names[0]


def who_listens(address: str, env: Mapping[str, str] = os.environ) -> str | None:
    """The name of the cluster with a door at this address."""
    for cluster in running_clusters(env):
        if any(cluster.content.get(key) == address for key in _ADDRESSES):
            return cluster.name
    return None


def clear_stale(env: Mapping[str, str] = os.environ) -> list[str]:
    """Empties and removes the run directories whose supervisor died without doing so; their names."""
    cleared = []
    for name in _names(env):
        if is_running(name, env):
            continue
        try:
            RunDir.claim(name, env).release()
        except (RunDirError, OSError) as error:  # somebody just started it, or it is not ours to touch
            log.info("run directory left alone", cluster=name, reason=str(error))
            continue
        log.warning("cleared what a dead cluster left", cluster=name)
        cleared.append(name)
    return cleared


def _names(env: Mapping[str, str]) -> list[str]:
    """Names of clusters that have a run directory."""
    names = []
    with contextlib.suppress(OSError), os.scandir(regions_path(env).parent) as entries:
        for entry in entries:
            with contextlib.suppress(RunDirError):  # no cluster's name
                if run_path(entry.name, env).is_dir():
                    names.append(entry.name)
    return sorted(names)[:CLUSTERS_MAX]
