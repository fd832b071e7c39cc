"""What the name of a lane says of its host. Pure.

    lane-0          of the coordinator's own host: ""
    build-2/lane-0  of the host that joined as build-2

Invariant: the names of hosts and lanes have no slash of their own.
"""

from __future__ import annotations


def host_of(lane: str) -> str:
    """The host that it runs on."""
    return lane.rpartition("/")[0]


def split(lane: str) -> tuple[str, str]:
    """The host and the lane's name there."""
    host, _, name = lane.rpartition("/")
    return host, name
