"""`expressway inspect`: what is in a pack. The work is `python -m shared_experts inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from coordinator.cli.handover import become
from coordinator.config import check_pack


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(pack: Path, as_json: bool) -> None:
    """Show what is in PACK: model, formats, sections."""
    check_pack(pack)
    become("shared_experts", "inspect", *(("--json",) if as_json else ()), "--", str(pack))
