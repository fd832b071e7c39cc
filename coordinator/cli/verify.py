"""`expressway verify`: checks every byte of a pack. The work is `python -m shared_experts verify`."""

from __future__ import annotations

import click

from coordinator.cli.handover import become


@click.command()
@click.argument("pack", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(pack: str, as_json: bool) -> None:
    """Check every section of PACK against its digest."""
    become("shared_experts", "verify", *(("--json",) if as_json else ()), "--", pack)
