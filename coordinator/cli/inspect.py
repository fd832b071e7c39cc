"""`expressway inspect`: what is in a pack. The work is `python -m shared_experts inspect`."""

from __future__ import annotations

import click

from coordinator.cli.handover import become


@click.command()
@click.argument("pack", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(pack: str, as_json: bool) -> None:
    """Show what is in PACK: model, formats, sections."""
    become("shared_experts", "inspect", *(("--json",) if as_json else ()), "--", pack)
