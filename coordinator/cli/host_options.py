"""Options of commands that run a host of a cluster until they are told to stop: `serve` and `cluster join`.

Not here: those of its lanes (lane_options). Invariant: both commands know them by one name, with one default.
"""

from __future__ import annotations

import click

from coordinator.cli.values import CLUSTER
from coordinator.config import LANES_MAX

lanes = click.option(
    "--lanes", type=click.IntRange(1, LANES_MAX), default=1, show_default=True, help="Engine processes."
)
cluster = click.option(
    "--cluster", type=CLUSTER, default="default", show_default=True, metavar="NAME", help="Of the run directory."
)
cores_per_lane = click.option(
    "--cores-per-lane",
    type=click.IntRange(1),
    metavar="N",
    help="Default: all allowed cores, split evenly; beside GPU lanes one of 8, two of 24 are left to the doors.",
)
start_timeout = click.option(
    "--start-timeout", "start_timeout_s", type=click.FloatRange(1), default=1800.0, show_default=True,
    metavar="SECONDS", help="Give up when not ready by then.",
)  # fmt: skip
log_json = click.option("--log-json", is_flag=True, help="All logs as JSON lines.")
ready_json = click.option(
    "--ready-json", "--json", "ready_json", is_flag=True, help="When ready, one JSON line on stdout."
)
