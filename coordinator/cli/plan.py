"""`expressway plan`: how many lanes fit, what share of the experts each caches, and how fast a token can be.

Not here: the arithmetic (sizing, model_sizes). Invariant: nothing is started and nothing measured; a figure that rests
on an assumption is shown with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.cli.values import CONTEXT, SIZE
from coordinator.config import DEFAULT_CPU_BUDGET, LANES_MAX, check_pack
from coordinator.errors import BadOption
from coordinator.model_sizes import ModelSizes, read_sizes
from coordinator.pack_facts import inspect_pack
from coordinator.pack_file import read_pack_file
from coordinator.sizing import ASSUMPTIONS, Host, Load, Plan, Rates, most_lanes, plan
from coordinator.units import rate, size

RATES_FILE_BYTES = 64 << 10
SHOWN_LANES = 8


@click.command(short_help="Predict how many lanes of PACK fit, and how fast they are.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--vram", type=SIZE, default=DEFAULT_CPU_BUDGET, show_default=True, metavar="SIZE",
              help="cuda: all that a lane may use of its GPU. cpu: its expert cache, in host memory.")  # fmt: skip
@click.option("--ram", type=SIZE, metavar="SIZE", help="Of the host. Default: this host's.")
@click.option("--cores", type=click.IntRange(1, 4096), metavar="N", help="Of the host. Default: those allowed here.")
@click.option("--lanes", type=click.IntRange(1, LANES_MAX), metavar="N",
              help=f"Default: every number that fits, up to {SHOWN_LANES}.")  # fmt: skip
@click.option("--conversations", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
              help="Kept in memory by each lane.")  # fmt: skip
@click.option("--context", type=CONTEXT, default=8192, show_default=True, metavar="N", help="Tokens of each of them.")
@click.option("--hit-rate", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Measured or expected, 0 to 1. Default: bounds from even and from skewed routing.")  # fmt: skip
@click.option("--rates", "rates_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Rates of the hardware as `python -m bench.rates` measures them.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(
    pack: Path,
    device: str,
    vram: int,
    ram: int | None,
    cores: int | None,
    lanes: int | None,
    conversations: int,
    context: int,
    hit_rate: float | None,
    rates_file: Path | None,
    as_json: bool,
) -> int:
    """Predict what PACK needs and how fast it can be: lanes, memory, cache share, bytes and tokens per second.

    Exit code 1 when what was asked for does not fit.
    """
    sizes = read_sizes(inspect_pack(check_pack(pack)))
    if context > sizes.context_tokens:
        raise BadOption(f"--context: {context} tokens; the model holds at most {sizes.context_tokens}")
    host = Host(device, _host_ram() if ram is None else ram, vram, cores or len(os.sched_getaffinity(0)))
    load = Load(conversations, context, hit_rate)
    rates = read_rates(rates_file) if rates_file else Rates()
    most = lanes or max(1, most_lanes(sizes, host, load, rates, SHOWN_LANES))
    numbers = range(lanes or 1, most + 1)
    plans = [plan(sizes, host, load, rates, number) for number in numbers]
    if as_json:
        print(json.dumps(to_json(sizes, host, load, rates, plans, measured=rates_file is not None)))
    else:
        show(sizes, host, load, plans, measured=rates_file is not None)
    return 0 if all(each.fits for each in plans) else 1


def read_rates(file: Path) -> Rates:
    """What a file says over what is assumed. Raises BadOption for anything but known rates in bounds."""
    try:
        given = json.loads(read_pack_file(file, RATES_FILE_BYTES))["rates"]
        return replace(Rates(), **given)
    except FileNotFoundError:
        raise BadOption(f"--rates: {file}: no such file") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadOption(f"--rates: {file}: {error}") from None


def to_json(
    sizes: ModelSizes, host: Host, load: Load, rates: Rates, plans: list[Plan], *, measured: bool
) -> dict[str, Any]:
    """For programs."""
    return {
        "model": {**asdict(sizes), "expert_bytes_per_token": sizes.expert_bytes_per_token},
        "host": asdict(host),
        "load": asdict(load),
        "rates": {**asdict(rates), "measured": measured},
        "assumptions": list(ASSUMPTIONS),
        "plans": [{**asdict(each), "fits": each.fits} for each in plans],
    }


def show(sizes: ModelSizes, host: Host, load: Load, plans: list[Plan], *, measured: bool) -> None:
    """For people."""
    console = Console(highlight=False)
    console.print(
        f"{sizes.name}: {sizes.layers} layers of {sizes.experts} experts, {sizes.experts_per_token} a token, "
        f"{sizes.expert_format}\n"
        f"region {size(sizes.region_bytes)}, once a host; a token reads {size(sizes.expert_bytes_per_token)} of it\n"
        f"n-gram tables {size(sizes.ngram_bytes)} on disk\n"
        f"each lane: dense weights {size(plans[0].dense_bytes)}, state {size(plans[0].state_bytes)} "
        f"({load.conversations} conversations of {load.tokens} tokens)"
    )
    table = Table(
        "lanes", "cores each", "spare", "RAM", "RAM left", "cache", "hits", "tokens/s a lane", "all", box=None
    )
    for each in plans:
        table.add_row(
            *(str(each.lanes), str(each.cores_per_lane), str(each.cores_spare)),
            *(size(each.ram_bytes), size(each.ram_free_bytes)),
            f"{size(each.cache_bytes)} = {each.cache_share:.0%}",
            _range(each.hit_rate, "{:.0%}".format),
            _range(each.tokens_per_s, rate),
            _range(each.total_tokens_per_s, rate),
        )
    console.print(table)
    if reading := plans[0].prefill_tokens_per_s:  # 0: no room for a row
        link, products, launches = (f"{plans[0].prefill_s[part]:.2f} s" for part in ("link", "products", "launches"))
        console.print(
            f"reading a long prompt: {rate(reading)} tokens/s a lane; a chunk of {plans[0].prefill_chunk_tokens} takes "
            f"{link} of the link beside {products} of products, and {launches} of launches"
        )
    for each in plans:
        for reason in each.reasons:
            console.print(f"{_lanes(each.lanes)} not fit: {reason}")
    console.print("rates: " + ("measured" if measured else "assumed; `python -m bench.rates` measures this host's"))
    for line in ASSUMPTIONS:
        console.print(f"assumed: {line}")


def _range(pair: tuple[float, float], form: Callable[[float], str]) -> str:
    low, high = (form(value) for value in pair)
    return low if low == high else f"{low} to {high}"


def _lanes(n: int) -> str:
    return "1 lane does" if n == 1 else f"{n} lanes do"


def _host_ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
