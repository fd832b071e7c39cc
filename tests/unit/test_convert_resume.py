"""A conversion that was ended by anything goes on where it was, and never into a pack that is wrong."""

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from shared_experts import pack_writer, safetensors_reader
from shared_experts.convert import convert
from shared_experts.errors import CheckpointError, ConversionBusy, NoSpace, OutputExists, StorageError
from shared_experts.journal import Journal
from shared_experts.pack import Pack
from tests.fakes.checkpoints import edit_json, small_checkpoint

SECTIONS = ["experts.0", "experts.1", "experts.2", "experts.3", "experts.4", "dense", "ngram.1.0"]
FILES = ["file.tokenizer.json", "file.tokenizer_config.json", "file.generation_config.json", "file.chat_template.jinja"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("source") / "c", tokenizer=True)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """The files of an undisturbed pack."""
    target = tmp_path_factory.mktemp("whole") / "p"
    convert(checkpoint, target, experts="q4g32")
    return contents(target)


def contents(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def journal_of(target):
    journal = Journal(target.parent / f".{target.name}.partial" / "journal")
    journal.close()
    return journal


def stopped(checkpoint, target, when, **options):
    """A conversion that is interrupted at the first step of a section, or before the manifest."""

    def stop(what, done, total):
        if what == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, target, experts="q4g32", progress=stop, **options)
    assert not target.exists()


@pytest.mark.parametrize("when", [*SECTIONS, *FILES, "manifest.msgpack"])
def test_what_is_finished_is_kept_and_only_the_rest_is_written(checkpoint, whole, tmp_path, when):
    target, order = tmp_path / "p", [*SECTIONS, *FILES, "manifest.msgpack"]
    stopped(checkpoint, target, when)
    before = order.index(when)
    assert list(journal_of(target).done) == order[:before]
    notes, written = [], []
    convert(
        checkpoint, target, experts="q4g32", notify=notes.append, progress=lambda what, *_: written.append(what)
    )  # fmt: skip
    assert list(dict.fromkeys(written)) == order[before:]
    assert notes == ([f"resuming: {before} of {len(order) - 1} sections are kept"] if before else [])
    assert contents(target) == whole
    assert sorted(os.listdir(tmp_path)) == ["p"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c, o: o.update(experts="f32"), "experts was q4g32, now f32"),
        (lambda c, o: o.update(dense="f32"), "dense was bf16, now f32"),
        (lambda c, o: os.utime(c / "model.safetensors", (1, 1)), "the checkpoint has changed"),
        (lambda c, o: edit_json(c / "config.json", lambda v: v.update(rope_theta=5)), "the checkpoint has changed"),
        (lambda c, o: (c / "tokenizer.json").unlink(), "the checkpoint has changed"),
    ],
    ids=["experts", "dense", "time", "config", "tokenizer"],
)
def test_another_source_or_option_starts_over_and_says_why(checkpoint, tmp_path, change, why):
    source, target, options = tmp_path / "c", tmp_path / "p", {"experts": "q4g32"}
    shutil.copytree(checkpoint, source)
    stopped(source, target, "dense")
    change(source, options)
    notes = []
    convert(source, target, notify=notes.append, **options)
    assert notes == [f"an unfinished conversion to this target cannot be resumed ({why}); starting over"]
    clean = {**options, "threads": 1}
    convert(source, tmp_path / "clean", **clean)
    assert contents(target) == contents(tmp_path / "clean")


def test_restart_keeps_nothing(checkpoint, whole, tmp_path):
    stopped(checkpoint, tmp_path / "p", "dense")
    notes = []
    convert(checkpoint, tmp_path / "p", experts="q4g32", restart=True, notify=notes.append)
    assert notes == []
    assert contents(tmp_path / "p") == whole


@pytest.mark.parametrize("file", ["experts.bin", "ngram.bin", "manifest.msgpack"])
def test_bytes_behind_the_last_section_are_cut_off(checkpoint, whole, tmp_path, file):
    stopped(checkpoint, tmp_path / "p", "dense")
    path = tmp_path / ".p.partial" / "pack" / file
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"x" * 2_000_000)
    convert(checkpoint, tmp_path / "p", experts="q4g32")
    assert contents(tmp_path / "p") == whole


@pytest.mark.parametrize("file", ["experts.bin", "ngram.bin", "dense.safetensors"])
def test_a_kept_section_whose_bytes_changed_is_written_again(checkpoint, whole, tmp_path, file):
    target = tmp_path / "p"
    stopped(checkpoint, target, "manifest.msgpack")
    with (tmp_path / ".p.partial" / "pack" / file).open("r+b") as spoilt:
        spoilt.seek(5000)
        byte = spoilt.read(1)[0]
        spoilt.seek(5000)
        spoilt.write(bytes([byte ^ 1]))
    notes = []
    convert(checkpoint, target, experts="q4g32", notify=notes.append)
    assert notes == ["resuming: 10 of 11 sections are kept"]
    assert contents(target) == whole


def test_any_cut_and_any_flip_of_the_journal_is_survived(checkpoint, whole, tmp_path):
    target, partial = tmp_path / "p", tmp_path / ".p.partial"
    stopped(checkpoint, target, "manifest.msgpack")
    shutil.copytree(partial, tmp_path / "saved")
    journal = (partial / "journal").read_bytes()
    random_ = random.Random(3)
    for round_ in range(24):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", partial)
        os.chmod(partial, 0o700)
        at = random_.randrange(len(journal))
        spoilt = journal[:at] if round_ % 2 else journal[:at] + bytes([journal[at] ^ 4]) + journal[at + 1 :]
        (partial / "journal").write_bytes(spoilt)
        convert(checkpoint, target, experts="q4g32", threads=1)
        assert contents(target) == whole
        shutil.rmtree(target)


def test_a_journal_of_another_kind_starts_over(checkpoint, whole, tmp_path):
    stopped(checkpoint, tmp_path / "p", "dense")
    (tmp_path / ".p.partial" / "journal").write_bytes(b"\x00" * 100)
    notes = []
    convert(checkpoint, tmp_path / "p", experts="q4g32", notify=notes.append)
    assert "its journal cannot be read" in notes[0]
    assert contents(tmp_path / "p") == whole


def test_two_conversions_to_one_target_do_not_mix(checkpoint, tmp_path):
    refused = []

    def another(what, done, total):
        if what == "dense" and not refused:
            with pytest.raises(ConversionBusy) as refusal:
                convert(checkpoint, tmp_path / "p", experts="f32")
            refused.append(refusal)

    convert(checkpoint, tmp_path / "p", experts="f32", progress=another)
    assert refused
    with Pack.open(tmp_path / "p") as pack:
        pack.verify()
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(checkpoint, tmp_path, mode):
    (tmp_path / ".p.partial").mkdir()
    os.chmod(tmp_path / ".p.partial", mode)
    with pytest.raises(OutputExists, match="only this user"):
        convert(checkpoint, tmp_path / "p", experts="f32")


def test_a_link_in_the_way_is_refused(checkpoint, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".p.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputExists, match="in the way"):
        convert(checkpoint, tmp_path / "p", experts="f32")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_checkpoint_that_is_refused_leaves_nothing(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "c")
    header = int.from_bytes((source / "model.safetensors").read_bytes()[:8], "little")
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(8 + header + 40)
        file.write(b"\xff\xff\xff\x7f")
    with pytest.raises(CheckpointError, match="not finite"):
        convert(source, tmp_path / "p", experts="q4g32")
    assert os.listdir(tmp_path) == ["c"]


def test_a_checkpoint_that_changes_meanwhile_is_refused(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "c")

    def touch(what, done, total):
        if what == "dense":
            os.utime(source / "model.safetensors", (1, 1))

    with pytest.raises(CheckpointError, match="changed while it was converted"):
        convert(source, tmp_path / "p", experts="q4g32", progress=touch)
    assert os.listdir(tmp_path) == ["c"]


class Failing:
    """A call of the operating system that fails from its n-th use on, `times` times."""

    def __init__(self, call, at, error, times=1 << 30):
        self.call, self.at, self.error, self.times = call, at, error, times

    def __call__(self, *arguments):
        self.at -= 1
        if self.at < 0 and self.times > 0:
            self.times -= 1
            raise OSError(self.error, os.strerror(self.error))
        return self.call(*arguments)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("at", [0, 1, 5, 11])
@pytest.mark.parametrize(
    ("error", "refusal", "words"),
    [
        (errno.ENOSPC, NoSpace, "No space left on device"),
        (errno.EDQUOT, NoSpace, "quota"),
        (errno.EIO, StorageError, "Input/output error"),
    ],
    ids=["full", "quota", "broken"],
)
def test_a_target_that_fails_keeps_what_is_finished(
    checkpoint, whole, tmp_path, monkeypatch, call, at, error, refusal, words
):
    with monkeypatch.context() as patch:
        patch.setattr(pack_writer.os, call, Failing(getattr(os, call), at, error))
        with pytest.raises(refusal, match=words) as refused:
            convert(checkpoint, tmp_path / "p", experts="q4g32", threads=1)
    assert refused.value.retryable
    assert not (tmp_path / "p").exists()
    finished = len(journal_of(tmp_path / "p").done)
    notes = []
    convert(checkpoint, tmp_path / "p", experts="q4g32", notify=notes.append)
    assert notes == ([f"resuming: {finished} of 11 sections are kept"] if finished else [])
    assert contents(tmp_path / "p") == whole


@pytest.mark.parametrize("at", [0, 7, 30])
def test_a_source_that_fails_names_the_tensor_and_is_resumed(checkpoint, whole, tmp_path, monkeypatch, at):
    failing = Failing(os.preadv, at, errno.EIO)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_reader.os, "preadv", failing)
        with pytest.raises(StorageError, match=r"model\.safetensors: tensor '.*': cannot be read: Input/output error"):
            convert(checkpoint, tmp_path / "p", experts="q4g32", threads=1)
    assert not (tmp_path / "p").exists()
    convert(checkpoint, tmp_path / "p", experts="q4g32")
    assert contents(tmp_path / "p") == whole


LIMITED = """
import resource, sys
from shared_experts.convert import convert
from shared_experts.errors import NoSpace
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    convert(sys.argv[1], sys.argv[2], experts="q4g32")
except NoSpace as error:
    print(error)
    sys.exit(28)
"""


def test_a_limit_on_file_sizes_ends_it_in_order(checkpoint, whole, tmp_path):
    """The limit lies inside the third layer of experts: two are kept."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    limit = 4 * 8192 * 2 + 5000
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, checkpoint, tmp_path / "p", str(limit)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (28, b"")
    assert b"section 'experts." in done.stdout
    kept = journal_of(tmp_path / "p").done
    assert kept
    assert all(section.offset + section.bytes <= limit for section in kept.values())
    convert(checkpoint, tmp_path / "p", experts="q4g32")
    assert contents(tmp_path / "p") == whole


KILLS = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from shared_experts.convert import convert
from shared_experts.journal import Journal
from shared_experts.pack import Pack

source, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
target, partial = folder / "p", folder / ".p.partial"
rng = random.Random(seed)
began = time.monotonic()
convert(source, folder / "reference", experts="q4g32", threads=2)
whole_s = time.monotonic() - began
with Pack.open(folder / "reference") as pack:
    wanted = pack.fingerprint

def lines():
    if not (partial / "journal").exists():
        return [], {}
    journal = Journal(partial / "journal")
    journal.close()
    return journal.begun, journal.done

killed = redone_most = packs = 0
while killed < kills or not packs:
    before, kept = lines()
    child = os.fork()
    if child == 0:
        try:
            convert(source, target, experts="q4g32", threads=2)
        finally:
            os._exit(0)
    time.sleep(rng.uniform(0, whole_s))
    if killed < kills:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed += os.WIFSIGNALED(status) and not target.exists()
    begun, done = lines()
    # what this run began but did not finish is all that the next one does again
    mine = begun[len(before):] if len(begun) >= len(before) else begun
    assert not set(mine) & set(kept), (mine, kept)
    lost = [name for name in mine if name not in done]
    assert len(lost) <= 1, lost
    redone_most = max(redone_most, len(lost))
    if target.exists():
        with Pack.open(target) as pack:
            pack.verify()
            assert pack.fingerprint == wanted
        for file in (folder / "reference").iterdir():
            assert file.read_bytes() == (target / file.name).read_bytes(), file.name
        shutil.rmtree(target)
        shutil.rmtree(partial, ignore_errors=True)
        packs += 1
print(killed, redone_most, packs)
"""


def kill_many(checkpoint, folder, kills, seed):
    command = [sys.executable, "-c", KILLS, checkpoint, folder, str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    killed, most, packs = map(int, done.stdout.split())
    assert killed == kills
    assert packs >= 1
    return most


def test_kills_at_random_moments(checkpoint, tmp_path):
    assert kill_many(checkpoint, tmp_path, 25, seed=1) <= 1


@pytest.mark.slow
def test_two_hundred_kills_at_random_moments(checkpoint, tmp_path):
    assert kill_many(checkpoint, tmp_path, 200, seed=2) == 1


def test_a_kill_between_the_rename_and_the_sweep_leaves_a_whole_pack(checkpoint, whole, tmp_path):
    script = (
        "import os, signal, sys\n"
        "from shared_experts import convert as c, temporary\n"
        "temporary.PartialFolder.discard = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "c.convert(sys.argv[1], sys.argv[2], experts='q4g32')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, checkpoint, tmp_path / "p"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert contents(tmp_path / "p") == whole
    shutil.rmtree(tmp_path / "p")
    convert(checkpoint, tmp_path / "p", experts="q4g32")
    assert contents(tmp_path / "p") == whole
    assert os.listdir(tmp_path) == ["p"]
