"""`expressway top`: the page's snapshot in a terminal, again every second.

Not here: what a snapshot says (page.snapshot), a cluster's addresses (clusters). Invariants: what came over the wire is
shown as text, never as markup or control characters; with `--json` stdout carries the snapshots as they came, a line
each.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from coordinator.cli.values import CLUSTER, HTTP
from coordinator.config import Address
from coordinator.errors import CoordinatorError, RunDirError
from coordinator.host.clusters import the_cluster
from coordinator.host.rundir import read_cluster
from coordinator.page.snapshot import VERSION
from coordinator.reported import reported

TIMEOUT_S = 5.0
ANSWER_BYTES = 8 << 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_PER_BLOCK = 5
_MAP_BLOCKS = 24
_TALKS = 8
_NAME_CELLS = 24
_STYLES = {"busy": "bold blue", "ready": "green", "dead": "bold red", "quarantined": "bold red"}


@click.command(short_help="Watch lanes, queue and errors of a running cluster.")
@click.option("--cluster", type=CLUSTER, metavar="NAME", help="Default: the one that runs.")
@click.option("--address", type=HTTP, metavar="HOST:PORT", help="Of a page that was forwarded here, in place of one.")
@click.option("--every", "every_s", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="One snapshot, then end.")
@click.option("--json", "as_json", is_flag=True, help="Snapshots as JSON, a line each.")
def command(cluster: str | None, address: Address | None, every_s: float, once: bool, as_json: bool) -> None:
    """Watch lanes, queue and errors of a running cluster, as its page shows them."""
    page = address or find_page(cluster)
    console = Console(highlight=False, markup=False, emoji=False)
    body, now = read_snapshot(page)
    if once and not as_json:
        console.print(view(now))
    if as_json:
        print(body, flush=True)
    while as_json and not once:
        time.sleep(every_s)
        print(read_snapshot(page)[0], flush=True)
    if once:
        return
    while not console.is_terminal:  # a pipe or a file: one below the other
        console.print(view(now))
        sys.stdout.flush()
        time.sleep(every_s)
        now = read_snapshot(page)[1]
    with Live(view(now), console=console, screen=True, auto_refresh=False) as shown:
        while True:
            time.sleep(every_s)
            try:
                now = read_snapshot(page)[1]
                shown.update(view(now), refresh=True)
            except CoordinatorError as error:  # its coordinator may be back in a second
                shown.update(Group(Text(f"{error.message}; trying again", "bold red"), view(now)), refresh=True)


def find_page(cluster: str | None) -> Address:
    """Where the page of a cluster of this host listens. RunDirError when there is none."""
    env = dict(os.environ)
    cluster = the_cluster(cluster, env)
    page = read_cluster(cluster, env).get("page")
    if not isinstance(page, str):
        raise RunDirError(f"the page of cluster {cluster!r} is off (serve --page HOST:PORT)")
    return Address.parse(page)


def read_snapshot(page: Address) -> tuple[str, dict[str, Any]]:
    """One snapshot, as it came and parsed. `unreachable` when nobody answers with one."""
    connection = http.client.HTTPConnection(page.host, page.port, timeout=TIMEOUT_S)
    try:
        key = os.environ.get("EXPRESSWAY_API_KEY")
        connection.request("GET", "/snapshot", headers={"x-api-key": key} if key else {})
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES + 1)
        if answer.status != 200 or len(body) > ANSWER_BYTES:
            wanted = "; it wants a key: EXPRESSWAY_API_KEY" if answer.status == 401 else ""
            raise unreachable(f"{page}: no page there (HTTP {answer.status}){wanted}")
        parsed = json.loads(body)
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(f"{page}: {error or 'no answer'}") from None
    except (ValueError, RecursionError):
        raise unreachable(f"{page}: what answers is no page") from None
    finally:
        connection.close()
    if not isinstance(parsed, dict) or parsed.get("v") != VERSION:
        raise unreachable(f"{page}: a page of another version")
    return json.dumps(parsed, separators=(",", ":")), parsed


def unreachable(message: str) -> CoordinatorError:
    """In the words of the other commands."""
    return reported("unreachable", message)


def view(now: dict[str, Any]) -> Group:
    """A snapshot for people."""
    parts: list[Text | Table] = [_head(now), _lanes(now["lanes"])]
    if now["queue"]["groups"]:
        parts.append(_queue(now["queue"]))
    if now["conversations"]:
        parts.append(_conversations(now["conversations"][:_TALKS]))
    if now["errors"]["latest"]:
        parts.append(_errors(now["errors"]["latest"][:5]))
    return Group(*parts)


def _regions(now: dict[str, Any]) -> str:
    others = [each for each in now["regions"] if each["host"]]
    said = [f"region {_plain(now['region']['state'])}"]
    return "   ".join([*said, *(f"{_plain(each['host'])} {_plain(each['state'])}" for each in others)])


def _head(now: dict[str, Any]) -> Text:
    totals, model = now["totals"], now["model"]
    name = f"{model['name']} ({model['expert_format']})" if model else "no model yet"
    lines = (
        f"{_plain(name)}   up {_ago(now['up_s'])}   {_regions(now)}",
        f"{totals['tokens_per_s']:.1f} tokens/s written   {totals['prompt_tokens_per_s']:.1f} read   "
        f"first token {_time(totals['first_token_s'])}",
        f"{totals['running']} running   {totals['waiting']} waiting   {totals['lanes_serving']} of {totals['lanes']} "
        f"lanes serving   {totals['answers']} answers   {totals['refused']} refused   {totals['failed']} failed",
    )
    return Text("\n".join(lines) + "\n")


def _lanes(lanes: list[dict[str, Any]]) -> Table:
    # in a narrow terminal the curve gives way, never the end of a name: it tells lanes of a host apart
    width = min(_NAME_CELLS, max((len(_plain(lane["name"])) for lane in lanes), default=0))
    name = Column("lane", min_width=width, overflow="fold")
    table = Table(name, "state", "tokens/s", "last minute", "first token", "experts", "cache", "work", box=None)
    for lane in lanes:
        shares, cache = lane["expert_share"], lane["cache"]
        known = shares["cache"] + shares["region"] > 0
        full = cache["used_bytes"] / cache["budget_bytes"] if cache["budget_bytes"] else 0.0
        table.add_row(
            _plain(lane["name"]),
            Text(_plain(lane["state"]), _STYLES.get(lane["state"], "yellow")),
            f"{lane['tokens_per_s']:.1f}",
            curve(lane["tokens_per_s_curve"]),
            _time(lane["first_token_s"]),
            f"{100 * shares['cache']:.0f} % hit" if known else "-",
            f"{100 * full:.0f} % full" + ("\n" + _map(cache["layers"]) if any(cache["layers"]) else ""),
            "\n".join(_work(work) for work in lane["work"]) or "-",
        )
    return table


def _work(work: dict[str, Any]) -> str:
    who = _plain(work["session"] or work["tenant"])
    if work["phase"] == "reading":
        return f"{who}: reads {work['prompt_tokens']} tokens, {_ago(work['age_s'])}"
    return f"{who}: {work['tokens']} of {work['max_tokens']} at most, {_ago(work['age_s'])}"


def _queue(queue: dict[str, Any]) -> Table:
    table = Table("waiting", "session", "requests", "prompt tokens", "longest", box=None)
    for group in queue["groups"]:
        table.add_row(
            _plain(group["tenant"]),
            _plain(group["session"] or "-"),
            *(str(group["requests"]), str(group["prompt_tokens"]), _ago(group["longest_s"])),
        )
    if queue["more"]:
        table.add_row(f"and {queue['more']} more")
    return table


def _conversations(talks: list[dict[str, Any]]) -> Table:
    table = Table("conversation", "prompt tokens", "kept of them", "asked", box=None)
    for talk in talks:
        places = [f"{_plain(lane)} {tokens}" for lane, tokens in talk["lane_tokens"].items()]
        places += [f"parked {talk['parked_tokens']}"] if talk["parked_tokens"] else []
        who = _plain(talk["session"] or talk["tenant"])
        table.add_row(who, str(talk["prompt_tokens"]), ", ".join(places) or "-", f"{_ago(talk['asked_s'])} ago")
    return table


def _map(layers: list[float]) -> str:
    """A block for each layer, or for several that are beside each other: how much of it is in the lane's own cache."""
    width = -(-len(layers) // _MAP_BLOCKS)
    parts = [layers[start : start + width] for start in range(0, len(layers), width)]
    return "".join(_BLOCKS[round(sum(part) / len(part) * (len(_BLOCKS) - 1))] for part in parts)


def _errors(latest: list[dict[str, Any]]) -> Table:
    table = Table("errors", "ago", "lane", "session", box=None)
    for error in latest:
        where = (_plain(error["lane"] or "-"), _plain(error["session"] or "-"))
        table.add_row(Text(_plain(error["code"]), "red"), _ago(error["ago_s"]), *where)
    return table


def curve(values: list[float]) -> str:
    """One block for five values, the greatest at the top; a minute is 12 wide."""
    starts = range(len(values) % _PER_BLOCK, len(values), _PER_BLOCK)
    means = [sum(values[start : start + _PER_BLOCK]) / _PER_BLOCK for start in starts]
    most = max(means, default=0.0)
    return "".join(_BLOCKS[round(mean / most * (len(_BLOCKS) - 1))] if most > 0 else _BLOCKS[0] for mean in means)


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _ago(seconds: float) -> str:
    for size, unit in ((172_800, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // (86_400 if unit == 'd' else size):.0f} {unit}"
    return f"{seconds:.0f} s"
