"""The commands `pack`, `inspect` and `verify`. Not here: what they do (`convert`, `pack`) or exit codes (`__main__`).

Invariant: standard output has only the result (one JSON line with `--json`); progress goes to standard error, and only
where that is a terminal.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from shared_experts.convert import convert
from shared_experts.golden import read as read_golden
from shared_experts.layout import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS
from shared_experts.manifest import NGRAM_FILE, Manifest
from shared_experts.pack import Pack, Progress

_FOLDER = click.Path(path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")


@click.command(name="pack")
@click.argument("source", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option(
    "--experts",
    type=click.Choice(list(EXPERT_FORMATS)),
    default=DEFAULT_EXPERT_FORMAT.name,
    show_default=True,
    help="How expert weights are written.",
)
@click.option(
    "--dense", type=click.Choice(["bf16", "f32"]), default="bf16", show_default=True, help="All other matrices."
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads that convert experts (default: one per CPU).")
@click.option("--restart", is_flag=True, help="Discard what an unfinished conversion to OUT left.")
@click.option("--golden/--no-golden", default=True, show_default=True, help="Run the model once for the self-test.")
@_JSON
def pack(
    source: Path,
    out: Path,
    experts: str,
    dense: str,
    threads: int | None,
    restart: bool,
    golden: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint directory SOURCE into the new pack OUT.

    A conversion that was stopped goes on where it was, when it is asked for again with the same options.
    """
    signal.signal(signal.SIGTERM, _stop)  # so that a stopped conversion ends in order
    began = time.monotonic()
    with _progress("pack") as progress:
        manifest = convert(
            source,
            out,
            experts=experts,
            dense=dense,
            threads=threads,
            progress=progress,
            restart=restart,
            notify=_note,
            golden=golden,
        )
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        click.echo(json.dumps({**describe(manifest, out), "seconds": seconds}))
    else:
        click.echo(
            f"{out}: {_size(_total(manifest))} in {seconds:.1f} s, fingerprint {manifest.fingerprint.hex()[:16]}"
        )


@click.command(name="inspect", short_help="Show what PACK holds.")
@click.argument("path", metavar="PACK", type=_FOLDER)
@_JSON
def inspect(path: Path, as_json: bool) -> None:
    """Show what PACK holds; checks the structure and the golden record, reads no weights."""
    with Pack.open(path) as opened:
        read_golden(path, opened.fingerprint)
        manifest = opened.manifest
    if as_json:
        click.echo(json.dumps(describe(manifest, path)))
        return
    e = manifest.experts
    click.echo(f"{manifest.name}: {manifest.architecture}, written by {manifest.created_by}")
    click.echo(f"fingerprint  {manifest.fingerprint.hex()}")
    drafts = f" ({e.draft_layers} of them draft)" if e.draft_layers else ""
    click.echo(f"experts      {e.format}, {e.layers} layers{drafts} of {e.experts}, {e.hidden} x {e.intermediate}")
    click.echo(f"             {_size(e.record_bytes)} each, {_size(e.layers * e.experts * e.record_bytes)} in all")
    for section in manifest.sections:
        if not section.name.startswith(("experts.", "ngram.")):
            click.echo(f"{section.name:<12} {_size(section.bytes)} in {section.file}")
    for table in manifest.ngram:
        rows = f"{table.rows} rows of {table.columns} in {table.dtype}"
        click.echo(f"ngram.{table.layer:<6} {_size(table.table_bytes)} in {NGRAM_FILE}, {rows}")
    click.echo(f"total        {_size(_total(manifest))}")


@click.command(name="verify")
@click.argument("path", metavar="PACK", type=_FOLDER)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads that read and hash (default: one per CPU).")
@_JSON
def verify(path: Path, threads: int | None, as_json: bool) -> None:
    """Read every byte of PACK and compare it with its digest."""
    began = time.monotonic()
    with Pack.open(path) as opened, _progress("verify") as progress:
        opened.verify(progress, threads=threads)
        read_golden(path, opened.fingerprint)
        manifest = opened.manifest
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        result = {"pack": str(path), "ok": True, "bytes": _total(manifest), "sections": len(manifest.sections)}
        click.echo(json.dumps({**result, "fingerprint": manifest.fingerprint.hex(), "seconds": seconds}))
    else:
        click.echo(
            f"{path}: all {len(manifest.sections)} sections are whole ({_size(_total(manifest))}, {seconds:.1f} s)"
        )


def describe(manifest: Manifest, path: Path) -> dict[str, object]:
    """A pack in JSON types, as `inspect --json` prints it."""
    e = manifest.experts
    return {
        "pack": str(path),
        "name": manifest.name,
        "architecture": manifest.architecture,
        "created_by": manifest.created_by,
        "fingerprint": manifest.fingerprint.hex(),
        "bytes": _total(manifest),
        "dense_dtype": manifest.dense_dtype,
        "experts": {
            "format": e.format,
            "hidden": e.hidden,
            "intermediate": e.intermediate,
            "layers": e.layers,
            "draft_layers": e.draft_layers,
            "experts": e.experts,
            "record_bytes": e.record_bytes,
            "bytes": e.layers * e.experts * e.record_bytes,
        },
        "ngram": [{"layer": n.layer, "rows": n.rows, "columns": n.columns, "dtype": n.dtype} for n in manifest.ngram],
        "sections": [
            {"name": s.name, "file": s.file, "offset": s.offset, "bytes": s.bytes, "sha256": s.sha256.hex()}
            for s in manifest.sections
        ],
        "config": manifest.config,
    }


def _stop(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _note(what: str) -> None:
    click.echo(f"note: {what}", err=True)


def _total(manifest: Manifest) -> int:
    return sum(section.bytes for section in manifest.sections)


def _size(count: int) -> str:
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count} B"


@contextmanager
def _progress(title: str) -> Iterator[Progress | None]:
    """A bar on standard error, or None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title} {what}", completed=done, total=total)

        yield show
