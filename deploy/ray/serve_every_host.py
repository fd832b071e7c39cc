#!/usr/bin/env python
"""One Expressway over all hosts of a Ray cluster, kept running; Ctrl-C or SIGTERM ends it everywhere.

    python serve_every_host.py PACK [--only RESOURCE] [-- OPTIONS of all [-- OPTIONS of `serve`]]

    this host        expressway serve PACK --join-at IP:PORT         the coordinator, its doors, lanes of its own
    every other one  expressway cluster join PACK --head IP:PORT     lanes, and a region of their own

Ray places and watches; no token passes through it. The pack must lie at the same path on every host, and each host's
certificate where `expressway cluster join` looks for it (docs/many-hosts.md). What ends is started again after 5 s,
10 s, … 60 s; hosts that come later join, too. Not here: what a host does.

Invariant: a server lives no longer than its actor, and the actor no longer than this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # it counts the shared region and would kill for it

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

POLL_S = 5.0
BACKOFF_MAX_S = 60.0
STOP_TIMEOUT_S = 90.0  # docs/processes.md: --drain + 10 s, 35 s, 5 s


class Host:
    """An actor: the parent of one host's `expressway`."""

    def __init__(self, argv: Sequence[str]) -> None:
        # the kernel tells the server when this actor is gone, however that went
        self._process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *argv], start_new_session=True)

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """SIGTERM, then SIGKILL; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(slots=True)
class Place:
    """One host: its actor, and when it may be started (again)."""

    name: str
    actor: Any = None
    starts: int = 0
    not_before_s: float = field(default=0.0)


def start(node_id: str, place: Place, argv: Sequence[str]) -> None:
    """A new actor on that host."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy}
    place.actor = ray.remote(Host).options(**options).remote(list(argv))
    place.starts += 1
    say(f"{place.name}: start {place.starts}")


def look(place: Place, now_s: float) -> None:
    """Notices an end; the next start comes after a while."""
    try:
        code = ray.get(place.actor.ended.remote())
    except ray.exceptions.RayError as error:
        code = f"its host or actor is gone ({type(error).__name__})"
    if code is not None:
        wait_s = min(BACKOFF_MAX_S, 5.0 * place.starts)
        say(f"{place.name}: ended: {code}; again in {wait_s:g} s")
        place.actor, place.not_before_s = None, now_s + wait_s


def split_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Our own words, those for every host, those for this one alone."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    own, for_all, for_serve = [*parts, [], []][:3]
    return own, for_all, for_serve


def say(text: str) -> None:
    """One line for the log."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Until a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack")
    parser.add_argument("--join-port", type=int, default=7443, help="of this host, for the others (default: 7443)")
    parser.add_argument("--gate-port", type=int, default=7444, help="of every other host (default: 7444)")
    parser.add_argument("--shared-identity", action="store_true", help="all others have the same certificate")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: the one of this host)")
    parser.add_argument("--only", metavar="RESOURCE", help="of the others, only hosts that have this Ray resource")
    own, for_all, for_serve = split_words(sys.argv[1:])
    asked = parser.parse_args(own)
    expressway = shutil.which("expressway") or "expressway"
    ray.init(address=asked.address, include_dashboard=False if asked.address == "local" else None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # after Ray, which sets one of its own
    here = ray.get_runtime_context().get_node_id()
    (address,) = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here]
    at = f"{address}:{asked.join_port}"
    serve = [expressway, "serve", asked.pack, "--join-at", at, "--log-json", *for_all, *for_serve]
    join = [expressway, "cluster", "join", asked.pack, "--head", at, "--log-json", *for_all]
    places: dict[str, Place] = {}
    try:
        while True:
            now_s = time.monotonic()
            alive = {
                node["NodeID"]: node
                for node in ray.nodes()
                if node["Alive"] and (node["NodeID"] == here or not asked.only or node["Resources"].get(asked.only))
            }
            places = {key: place for key, place in places.items() if key in alive}
            for node_id, node in alive.items():
                place = places.setdefault(node_id, Place(node["NodeManagerHostname"]))
                if place.actor is not None:
                    look(place, now_s)
                elif now_s >= place.not_before_s:
                    address = node["NodeManagerAddress"]
                    argv = [*join, "--listen", f"{address}:{asked.gate_port}"]
                    if asked.shared_identity:
                        argv += ["--suffix", address.replace(".", "-").replace(":", "-").strip("-")]
                    start(node_id, place, serve if node_id == here else argv)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say("stopping")
        stops = [place.actor.stop.remote() for place in places.values() if place.actor is not None]
        for stopped in stops:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(stopped)
        return 0


if __name__ == "__main__":
    sys.exit(main())
