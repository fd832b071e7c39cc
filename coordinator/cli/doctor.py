"""`expressway doctor`: will it run on this host, and what to do where it will not.

Not here: the checks (doctor_checks, doctor_host, doctor_ray, doctor_gpu).
Invariant: exit code 1 exactly when a check failed; warnings alone are 0.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from coordinator.cli.doctor_checks import Check, compiler, native_code, pack, port, run_directory
from coordinator.cli.doctor_gpu import gpu
from coordinator.cli.doctor_host import (
    huge_pages,
    memlock,
    memory,
    open_files,
    pack_fits,
    state_disk,
    transparent_huge_pages,
)
from coordinator.cli.doctor_ray import command_lines, installed_ray, other_rays, ray_environment, ray_version
from coordinator.cli.values import CLUSTER, GRPC, HTTP, PAGE, SIZE
from coordinator.config import DEFAULT_CPU_BUDGET, DEFAULT_GRPC, DEFAULT_HTTP, DEFAULT_PAGE, LANES_MAX, Address
from coordinator.errors import RunDirError
from coordinator.host.room import FREE_HUGE_PAGES, MEMINFO
from coordinator.host.rundir import state_dir

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line names; None where a default would do."""

    pack: str | None = None
    cluster: str = "default"
    lanes: int = 1
    cache_bytes: int = 0
    http: str | None = None
    grpc: str | None = None
    page: str | None = None


@click.command(short_help="Check this host, and whether PACK fits.")
@click.argument("pack", type=click.Path(), required=False)
@click.option(
    "--cluster",
    type=CLUSTER,
    default="default",
    show_default=True,
    metavar="NAME",
    help="Whose directories.",
)
@click.option(
    "--lanes", type=click.IntRange(1, LANES_MAX), default=1, show_default=True, help="Lanes PACK must fit with."
)
@click.option("--vram-budget", type=SIZE, metavar="SIZE", default=DEFAULT_CPU_BUDGET, show_default=True,
              help="Each lane's cache.")  # fmt: skip
@click.option("--http", type=HTTP, metavar="HOST:PORT", help="Also check that this can be listened on.")
@click.option("--grpc", type=GRPC, metavar="HOST:PORT|unix:PATH", help="Also check that this can be listened on.")
@click.option("--page", type=PAGE, metavar="HOST:PORT", help="Also check that this can be listened on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(
    pack: str | None,
    cluster: str,
    lanes: int,
    vram_budget: int,
    http: Address | None,
    grpc: Address | None,
    page: Address | None,
    as_json: bool,
) -> int:
    """Check this host: native code, memory, limits, GPUs, Ray, directories, ports; and whether PACK fits."""
    doors = (str(address) if address else None for address in (http, grpc, page))
    checks = run_checks(Asked(pack, cluster, lanes, vram_budget, *doors), dict(os.environ))
    failed = any(check.state == "fail" for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [check.to_json() for check in checks]}))
    else:
        show(checks)
    return 1 if failed else 0


def run_checks(asked: Asked, env: Mapping[str, str]) -> list[Check]:
    """All checks, in the order in which a start would meet the trouble."""
    meminfo, limits = _text(str(MEMINFO)) or "", _text("/proc/self/limits") or ""
    free_pages = _text(str(FREE_HUGE_PAGES))
    checks = [compiler(), native_code(env)]
    if asked.pack is not None:
        found, described = pack(asked.pack, env)
        checks.append(found)
        if described is not None:
            count = int(free_pages) if free_pages and free_pages.strip().isdigit() else 0
            checks.append(pack_fits(described, meminfo, count, asked.lanes, asked.cache_bytes))
    checks += [
        memory(meminfo),
        memlock(limits),
        open_files(limits),
        huge_pages(free_pages),
        transparent_huge_pages(_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        gpu(env),
        ray_version(installed_ray()),
        ray_environment(env),
        other_rays(command_lines()),
        run_directory(asked.cluster, env),
    ]
    with contextlib.suppress(RunDirError):  # a bad cluster name: the line above has said so
        checks.append(state_disk(state_dir(asked.cluster, env)))
    return [
        *checks,
        port("HTTP port", asked.http or DEFAULT_HTTP, env, asked=asked.http is not None),
        port("gRPC address", asked.grpc or DEFAULT_GRPC, env, asked=asked.grpc is not None),
        port("page port", asked.page or DEFAULT_PAGE, env, asked=asked.page is not None),
    ]


def _text(path: str) -> str | None:
    """A file of the kernel, None where it has none."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def show(checks: list[Check]) -> None:
    """For people: one line each, and the remedy below where there is one. Never broken: they hold commands."""
    console = Console(highlight=False)
    for check in checks:
        console.print(
            Text.assemble((f"{check.state:>4}  ", _STYLES[check.state]), f"{check.name}: {check.found}"), soft_wrap=True
        )
        if check.remedy:
            console.print(Text(f"      → {check.remedy}"), soft_wrap=True)
