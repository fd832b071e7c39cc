"""`expressway pack`: turns a checkpoint into a pack. The work is `python -m shared_experts pack`."""

from __future__ import annotations

import click

from coordinator.cli.handover import become

EXPERT_FORMATS = ("q4g64", "q4g32", "q8", "f32")  # of `python -m shared_experts pack`; a test compares them


@click.command(short_help="Make a pack from a Hugging Face checkpoint.")
@click.argument("src", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--experts", "experts_format", type=click.Choice(EXPERT_FORMATS), default="q4g64", show_default=True,
              help="Format of the expert records. q4g32 where a size is no multiple of 64; f32 for tests.")  # fmt: skip
@click.option("--dense", type=click.Choice(["bf16", "f32"]), default="bf16", show_default=True, help="Dense weights.")
@click.option("--restart", is_flag=True, help="Discard what an unfinished conversion to OUT left.")
@click.option("--golden/--no-golden", default=True, show_default=True, help="Run the model once for the self-test.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def command(src: str, out: str, experts_format: str, dense: str, restart: bool, golden: bool, as_json: bool) -> None:
    """Make the pack OUT from the Hugging Face checkpoint directory SRC; one that was stopped goes on where it was."""
    flags = (
        *(("--restart",) if restart else ()),
        *(() if golden else ("--no-golden",)),
        *(("--json",) if as_json else ()),
    )
    become("shared_experts", "pack", "--experts", experts_format, "--dense", dense, *flags, "--", src, out)
