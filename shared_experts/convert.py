"""A checkpoint becomes a pack: streamed, checked, resumed where it was left, and there only when it is whole.

Everything is written into a locked directory beside the target and renamed in one step. Whatever ends a conversion
before that, finished sections stay there with their digests, and the next conversion of the same checkpoint with the
same options hashes them again and goes on; any other one starts over. Not here: what is written (`pack_plan`) and how
(`pack_writer`).

Invariant: the target either does not exist or is a whole, synced pack of one state of the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shared_experts.checkpoint import Checkpoint
from shared_experts.errors import CheckpointError, NoSpace, OutputExists
from shared_experts.floats import load_floats
from shared_experts.golden import make as make_golden
from shared_experts.journal import Ingredients, Journal
from shared_experts.layout import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, RecordLayout
from shared_experts.manifest import FILE_NAME, Manifest, Section, encode, finished
from shared_experts.pack import Progress
from shared_experts.pack_plan import PackPlan
from shared_experts.pack_writer import PackWriter
from shared_experts.program import version
from shared_experts.quantiser import load_quantiser
from shared_experts.qwen4_exp import ARCHITECTURE
from shared_experts.temporary import PartialFolder, refusing, sync_folder

Notify = Callable[[str], None]


def convert(
    source: Path | str,
    target: Path | str,
    *,
    experts: str = DEFAULT_EXPERT_FORMAT.name,
    dense: str = "bf16",
    threads: int | None = None,
    progress: Progress | None = None,
    restart: bool = False,
    notify: Notify | None = None,
    golden: bool = False,
) -> Manifest:
    """Writes the pack `target` from the checkpoint directory `source` and returns its manifest.

    `restart` discards what an unfinished conversion left; `notify` is told what became of it; with `golden`, a lane's
    code makes the golden record in a process of its own. Raises OutputExists, ConversionBusy, CheckpointError, NoSpace,
    StorageError or NativeMissing; then `target` is as it was.
    """
    target, say = Path(target), notify or (lambda _: None)
    if dense not in ("bf16", "f32"):
        raise ValueError(f"dense is bf16 or f32, not {dense!r}")
    if experts not in EXPERT_FORMATS:
        raise ValueError(f"experts is one of {', '.join(EXPERT_FORMATS)}, not {experts!r}")
    if os.path.lexists(target):
        raise OutputExists(f"{target}: is already there; packs are never overwritten")
    load_floats()  # refused before anything is written where the native library was not built
    with Checkpoint.open(source) as checkpoint:
        layout = _layout(checkpoint, experts)
        quantise = load_quantiser().of(layout.format) if layout.format.group else None
        plan = PackPlan(checkpoint, layout, dense, quantise)
        made_of = Ingredients(_program(), checkpoint.identity(), experts, dense)
        with PartialFolder(target) as partial:
            try:
                if restart:
                    partial.clear()
                with refusing(partial.path):
                    manifest = _fill(checkpoint, plan, made_of, partial, threads or os.cpu_count() or 1, progress, say)
                    if golden:
                        make_golden(partial.pack, manifest.fingerprint, say)
                    _publish(partial, target)
            except (CheckpointError, OutputExists):  # nothing of it can be used again
                partial.discard()
                raise
            except NoSpace:
                if not partial.journal.exists():
                    partial.discard()
                raise
    return manifest


def _fill(
    checkpoint: Checkpoint,
    plan: PackPlan,
    made_of: Ingredients,
    partial: PartialFolder,
    threads: int,
    progress: Progress | None,
    say: Notify,
) -> Manifest:
    """Brings the pack in the partial folder to its end."""
    _check_space(plan, partial)
    fresh = not partial.journal.exists()
    journal = Journal(partial.journal)
    try:
        if journal.ingredients != made_of:
            if not fresh:
                before = journal.ingredients
                why = (before and made_of.changes(before)) or "its journal cannot be read"
                say(f"an unfinished conversion to this target cannot be resumed ({why}); starting over")
            shutil.rmtree(partial.pack, ignore_errors=True)
            journal.start(made_of)
        partial.pack.mkdir(exist_ok=True)
        with PackWriter(partial.pack, plan, journal, threads, progress) as writer:
            kept = writer.keep()
            if not fresh and journal.done:
                say(f"resuming: {len(kept)} of {len(plan.sections)} sections are kept")
            manifest = _manifest(checkpoint, plan, made_of, writer.write(kept))
            if checkpoint.identity() != made_of.source:
                raise CheckpointError(checkpoint.path, "changed while it was converted")
            writer.write_small(FILE_NAME, encode(manifest))
    finally:
        journal.close()
    return manifest


def _publish(partial: PartialFolder, target: Path) -> None:
    sync_folder(partial.pack)
    try:
        os.rename(partial.pack, target)
    except OSError as error:
        if os.path.lexists(target):
            raise OutputExists(f"{target}: appeared while the pack was written") from error
        raise
    sync_folder(target.absolute().parent)
    partial.discard()


def _check_space(plan: PackPlan, partial: PartialFolder) -> None:
    """Refuses a conversion that would not fit beside what is already there of it."""
    free = shutil.disk_usage(partial.path).free
    there = sum(file.stat().st_blocks * 512 for file in partial.pack.glob("*"))
    needed = plan.total_bytes + (1 << 20) - there
    if needed > free:
        raise NoSpace(f"{partial.path.parent}: the pack needs {needed} bytes, {free} are free")


def _manifest(checkpoint: Checkpoint, plan: PackPlan, made_of: Ingredients, sections: tuple[Section, ...]) -> Manifest:
    name = "".join(c if c.isprintable() else "?" for c in checkpoint.path.resolve().name)
    return finished(
        Manifest(
            name=name.encode()[:256].decode(errors="ignore") or "model",
            architecture=ARCHITECTURE,
            config=checkpoint.config,
            experts=plan.experts,
            dense_dtype=made_of.dense,
            ngram=plan.tables,
            sections=sections,
            fingerprint=b"",
            created_by=made_of.program,
        )
    )


def _program() -> str:
    return f"expressway {version()}"


def _layout(checkpoint: Checkpoint, name: str) -> RecordLayout:
    text = checkpoint.text
    try:
        return RecordLayout.of(EXPERT_FORMATS[name], text.hidden, text.intermediate)
    except ValueError as error:
        fitting = [
            f.name for f in EXPERT_FORMATS.values()
            if f.group and not text.hidden % f.group and not text.intermediate % f.group
        ]  # fmt: skip
        advice = f"{fitting[-1]} fits" if fitting else "no quantised format fits; f32 does"
        raise CheckpointError(checkpoint.path / "config.json", f"{error}; {advice}") from None
