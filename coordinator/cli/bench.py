"""`expressway bench`: load over a server's public door, reports, comparisons. The work is `python -m bench`.

Not here: how load is driven. Invariant: without an address it measures the cluster of this host, and no other.
"""

from __future__ import annotations

import os

import click

from coordinator.cli.handover import become
from coordinator.cli.values import CLUSTER
from coordinator.errors import RunDirError
from coordinator.host.clusters import the_cluster
from coordinator.host.rundir import read_cluster

ACTIONS = ("run", "show", "compare")


class _Bench(click.Command):
    """Help of an action is the action's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] and args[0] in ACTIONS and {"-h", "--help"} & set(args):
            become("bench", args[0], "--help")
        return super().parse_args(ctx, args)


@click.command(
    cls=_Bench,
    context_settings={"ignore_unknown_options": True},
    short_help="Measure a running server, and compare reports.",
)
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THE ACTION]…")
@click.option("--cluster", type=CLUSTER, metavar="NAME", help="Of run: which one. Default: the one that runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of Markdown.")
def command(action: str, words: tuple[str, ...], cluster: str | None, as_json: bool) -> None:
    """Measure a running server over its public door (run), show a report (show FILE) or compare two (compare A B).

    `expressway bench run --help`, `bench show --help` and `bench compare --help` list all options.
    """
    if action == "run" and not _names(words, "--url") and not _names(words, "--grpc"):
        grpc = _names(words, "--walk")  # token ids
        door = ("--grpc", _door(cluster, "grpc")) if grpc else ("--url", f"http://{_door(cluster, 'http')}/v1")
        words = (*door, *words)
    become("bench", action, *(("--json",) if as_json else ()), *words)


def _names(words: tuple[str, ...], option: str) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in words)


def _door(cluster: str | None, name: str) -> str:
    env = dict(os.environ)
    cluster = the_cluster(cluster, env)
    found_cluster = read_cluster(cluster, env)
    if not found_cluster.get("ready"):
        raise RunDirError(f"cluster {cluster!r} is not ready yet")
    return str(found_cluster[name])
