"""`expressway bench`: load over a server's public door, reports, comparisons. The work is `python -m bench`.

Not here: how load is driven. Invariant: without `--url` it measures the cluster that runs on this host, and no other.
"""

from __future__ import annotations

import os

import click

from coordinator.cli.handover import become
from coordinator.cli.values import CLUSTER
from coordinator.errors import RunDirError
from coordinator.host.clusters import the_cluster
from coordinator.host.rundir import read_cluster

ACTIONS = ("run", "compare")


class _Bench(click.Command):
    """Help of an action is the action's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] and args[0] in ACTIONS and {"-h", "--help"} & set(args):
            become("bench", args[0], "--help")
        return super().parse_args(ctx, args)


@click.command(cls=_Bench, context_settings={"ignore_unknown_options": True})
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THE ACTION]…")
@click.option("--cluster", type=CLUSTER, metavar="NAME", help="Of run: which one. Default: the one that runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of Markdown.")
def command(action: str, words: tuple[str, ...], cluster: str | None, as_json: bool) -> None:
    """Measure a running server over its public door (run), or compare two reports (compare A B).

    `expressway bench run --help` and `expressway bench compare --help` list all options.
    """
    if action == "run" and not any(word == "--url" or word.startswith("--url=") for word in words):
        words = ("--url", f"http://{_http_door(cluster)}/v1", *words)
    become("bench", action, *(("--json",) if as_json else ()), *words)


def _http_door(cluster: str | None) -> str:
    env = dict(os.environ)
    cluster = the_cluster(cluster, env)
    found_cluster = read_cluster(cluster, env)
    if not found_cluster.get("ready"):
        raise RunDirError(f"cluster {cluster!r} is not ready yet")
    return str(found_cluster["http"])
