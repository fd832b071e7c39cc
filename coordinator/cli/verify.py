"""`expressway verify`: checks every byte of a pack. The work is `python -m shared_experts verify`."""

from __future__ import annotations

from pathlib import Path

import click

from coordinator.cli.handover import become
from coordinator.config import check_pack


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(pack: Path, as_json: bool) -> None:
    """Check every section of PACK against its digest."""
    check_pack(pack)
    become("shared_experts", "verify", *(("--json",) if as_json else ()), "--", str(pack))
