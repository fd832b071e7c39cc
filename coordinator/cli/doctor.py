"""`expressway doctor`: will it run on this host, and what to do where it will not.

Not here: the checks (doctor_checks). Invariant: exit code 1 exactly when a check failed; warnings alone are 0.
"""

from __future__ import annotations

import json
import os

import click
from rich.console import Console
from rich.text import Text

from coordinator.cli.doctor_checks import Check, run_checks

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--cluster", default="default", show_default=True, metavar="NAME", help="Whose run directory to check.")
@click.option("--http", default=None, metavar="HOST:PORT", help="Also check that this can be listened on.")
@click.option("--grpc", default=None, metavar="HOST:PORT|unix:PATH", help="Also check that this can be listened on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(cluster: str, http: str | None, grpc: str | None, as_json: bool) -> int:
    """Check this host: compiler, native code, memory, limits, Ray, ports, directories."""
    checks = run_checks(cluster, http, grpc, dict(os.environ))
    failed = any(check.state == "fail" for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [check.to_json() for check in checks]}))
    else:
        show(checks)
    return 1 if failed else 0


def show(checks: list[Check]) -> None:
    """For people: one line each, and the remedy below where there is one."""
    console = Console(highlight=False)
    for check in checks:
        console.print(Text.assemble((f"{check.state:>4}  ", _STYLES[check.state]), f"{check.name}: {check.found}"))
        if check.remedy:
            console.print(Text(f"      → {check.remedy}"))
