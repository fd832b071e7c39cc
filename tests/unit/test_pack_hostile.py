"""Spoiled packs, each refused with the file, the section or tensor where there is one, and the reason."""

import hashlib
import os
import shutil
from pathlib import Path

import msgpack
import pytest

from shared_experts import limits, manifest
from shared_experts.convert import convert
from shared_experts.errors import PackError
from shared_experts.pack import Pack
from tests.fakes.checkpoints import edit_header, edit_manifest, small_checkpoint
from tests.fakes.descriptors import held

MANIFEST, DENSE, EXPERTS, NGRAM = "manifest.msgpack", "dense.safetensors", "experts.bin", "ngram.bin"
EMBED, NORM = "model.embed_tokens.weight", "model.layers.0.linear_attn.norm.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    small_checkpoint(folder / "checkpoint", tokenizer=True)
    convert(folder / "checkpoint", folder / "pack", experts="q4g32", threads=1)
    return folder / "pack"


def body(change):
    return lambda path: edit_manifest(path, change)


def section(name, **values):
    return body(lambda b: next(s for s in b["sections"] if s["name"] == name).update(values))


def experts(**values):
    return body(lambda b: b["experts"].update(values))


def ngram(**values):
    return body(lambda b: b["ngram"][0].update(values))


def model(**values):
    return body(lambda b: b["config"].update(values))


def whole(change):
    def spoil(path):
        values = msgpack.unpackb((path / MANIFEST).read_bytes())
        change(values)
        (path / MANIFEST).write_bytes(msgpack.packb(values))

    return spoil


def append(name):
    """One byte behind the last section."""

    def spoil(path):
        with open(path / name, "ab") as file:
            file.write(b"\0")

    return spoil


def packed_body(data):
    """A manifest whose body is these bytes, with the right digest."""
    return whole(lambda v: v.update(body=data, sha256=hashlib.sha256(data).digest()))


def cut(file, by=1):
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - by)


def dense(change):
    """Changes the header of the dense tensors and makes the manifest agree about the file."""

    def spoil(path):
        edit_header(path / DENSE, change)
        data = (path / DENSE).read_bytes()
        section("dense", bytes=len(data), sha256=hashlib.sha256(data).digest())(path)

    return spoil


def twice(b):
    b["sections"].append(dict(b["sections"][0]))


def link(path):
    shutil.move(path / NGRAM, path / "elsewhere")
    (path / NGRAM).symlink_to(path / "elsewhere")


def extra_section(**values):
    new = {"name": "file.notes.txt", "file": "notes.txt", "offset": 0, "bytes": 0, "sha256": bytes(32)}
    return body(lambda b: b["sections"].append({**new, **values}))


NESTED: object = 1
for _ in range(limits.NESTING + 1):
    NESTED = [NESTED]

# name: (what is done to a copy, the file that is named, parts of the message)
CASES = {
    "manifest missing": (lambda p: (p / MANIFEST).unlink(), MANIFEST, ["No such file"]),
    "manifest a directory": (lambda p: ((p / MANIFEST).unlink(), (p / MANIFEST).mkdir()), MANIFEST, ["not a regular"]),
    "manifest empty": (lambda p: (p / MANIFEST).write_bytes(b""), MANIFEST, ["not valid msgpack"]),
    "manifest cut": (cut(MANIFEST), MANIFEST, ["not valid msgpack"]),
    "manifest with more": (
        lambda p: (p / MANIFEST).write_bytes((p / MANIFEST).read_bytes() + b"\0"), MANIFEST, ["not valid msgpack"],
    ),
    "manifest too large": (
        lambda p: os.truncate(p / MANIFEST, limits.MANIFEST_BYTES + 1), MANIFEST, [f"at most {limits.MANIFEST_BYTES}"],
    ),
    "manifest not a map": (lambda p: (p / MANIFEST).write_bytes(msgpack.packb([1])), MANIFEST, ["not a map"]),
    "manifest nested without end": (lambda p: (p / MANIFEST).write_bytes(b"\x91" * 100_000), MANIFEST, ["msgpack"]),
    "array longer than the file": (lambda p: (p / MANIFEST).write_bytes(b"\xdd\xff\xff\xff\xff"), MANIFEST, ["valid"]),
    "another magic": (whole(lambda v: v.update(magic="zip")), MANIFEST, ["not a pack's manifest"]),
    "another version": (whole(lambda v: v.update(version=1)), MANIFEST, ["version 1 is not read"]),
    "version as text": (whole(lambda v: v.update(version="1")), MANIFEST, ["version must be an integer"]),
    "unknown key outside": (whole(lambda v: v.update(more=1)), MANIFEST, ["unknown key 'more'"]),
    "body flipped": (
        whole(lambda v: v.update(body=v["body"][:40] + bytes([v["body"][40] ^ 1]) + v["body"][41:])), MANIFEST, ["SHA"],
    ),
    "key twice": (packed_body(b"\x82\xa1a\x01\xa1a\x02"), MANIFEST, ["key 'a' is given twice"]),
    "key not a string": (packed_body(b"\x81\x01\x02"), MANIFEST, ["not valid msgpack"]),
    "extension type": (packed_body(b"\x81\xa1a\xd4\x05\x00"), MANIFEST, ["not valid msgpack"]),
    "timestamp": (packed_body(b"\x81\xa1a\xd6\xff\x00\x00\x00\x01"), MANIFEST, ["not valid msgpack"]),
    "text not UTF-8": (packed_body(b"\x81\xa1a\xa1\xff"), MANIFEST, ["not valid msgpack"]),
    "unknown key": (body(lambda b: b.update(more=1)), MANIFEST, ["unknown key 'more'"]),
    "key missing": (body(lambda b: b.pop("dense_dtype")), MANIFEST, ["dense_dtype is missing"]),
    "another architecture": (body(lambda b: b.update(architecture="gpt2")), MANIFEST, ["architecture 'gpt2'"]),
    "dense dtype unknown": (body(lambda b: b.update(dense_dtype="f16")), MANIFEST, ["dense_dtype 'f16'"]),
    "config with bytes": (model(note=b"x"), MANIFEST, ["type bytes is not allowed"]),
    "config nested too deep": (model(note=NESTED), MANIFEST, ["nested deeper"]),
    "config with NaN": (model(rms_norm_eps=float("nan")), MANIFEST, ["not finite"]),
    "config of another model": (model(model_type="llama"), MANIFEST, ["model_type 'llama'"]),
    "config of another size": (model(hidden_size=128), MANIFEST, ["experts are (64, 32, 4, 4), the config says (128"]),
    "config with a layer more": (
        model(num_hidden_layers=5, layer_types=["linear_attention"] * 5), MANIFEST, ["the config says"],
    ),
    "config with other heads": (model(num_attention_heads=2), DENSE, ["q_proj.weight", "the config wants"]),
    "config without n-grams": (model(ple_layer_ids=[]), MANIFEST, ["the n-gram tables are not those"]),
    "config changed, fingerprint not": (
        lambda p: edit_manifest(p, lambda b: b["config"].update(rope_theta=5), sign=False), MANIFEST, ["fingerprint"],
    ),
    "digest changed, fingerprint not": (
        lambda p: edit_manifest(p, lambda b: b["sections"][0].update(sha256=bytes(32)), sign=False), MANIFEST,
        ["fingerprint"],
    ),
    "n-gram constants changed, fingerprint not": (
        lambda p: edit_manifest(p, lambda b: b["ngram"][0]["multipliers"].__setitem__(0, 9), sign=False), MANIFEST,
        ["fingerprint"],
    ),
    "format unknown": (experts(format="q3"), MANIFEST, ["experts.format 'q3'"]),
    "format that does not fit": (experts(format="q4g64"), MANIFEST, ["not a multiple of q4g64's group"]),
    "record size of another layout": (experts(record_bytes=8192), MANIFEST, ["the layout needs 4096"]),
    "experts zero": (experts(experts=0), MANIFEST, ["experts.experts must be an integer"]),
    "experts huge": (experts(experts=1 << 40), MANIFEST, ["experts.experts must be an integer"]),
    "layers true": (experts(layers=True), MANIFEST, ["experts.layers must be an integer"]),
    "a layer more than there is": (experts(layers=6), MANIFEST, ["section 'experts.5'", "is missing"]),
    "only draft layers": (experts(draft_layers=5), MANIFEST, ["leaves no decoder layer"]),
    "section twice": (body(twice), MANIFEST, ["two sections have one name"]),
    "section missing": (
        body(lambda b: b.update(sections=[s for s in b["sections"] if s["name"] != "experts.2"])), MANIFEST,
        ["section 'experts.2'", "is missing"],
    ),
    "section at another offset": (section("experts.1", offset=4096), MANIFEST, ["section 'experts.1'", "lies at 4096"]),
    "section with an oversized offset": (section("experts.1", offset=1 << 45), MANIFEST, ["section 'experts.1'"]),
    "section with a negative offset": (section("experts.1", offset=-1), MANIFEST, ["section.offset must be"]),
    "section of another size": (section("experts.1", bytes=1), MANIFEST, ["section 'experts.1'", "with 1 bytes"]),
    "section in another file": (section("experts.1", file="other.bin"), MANIFEST, ["section 'experts.1'", "other.bin"]),
    "section outside": (section("file.tokenizer.json", file="../tokenizer.json"), MANIFEST, ["plain file name"]),
    "section absolute": (section("file.tokenizer.json", file="/etc/passwd"), MANIFEST, ["plain file name"]),
    "section in the manifest": (extra_section(name=f"file.{MANIFEST}", file=MANIFEST), MANIFEST, ["plain file name"]),
    "section with a short digest": (section("dense", sha256=b"1"), MANIFEST, ["section.sha256 must be 32 bytes"]),
    "section name that is none": (extra_section(name="surprise"), MANIFEST, ["section 'surprise'"]),
    "section overlapping": (
        extra_section(name=f"file.{EXPERTS}", file=EXPERTS, bytes=8), MANIFEST, ["overlaps another section"],
    ),
    "section without a file": (extra_section(), "notes.txt", ["No such file"]),
    "n-gram dtype unknown": (ngram(dtype="i8"), MANIFEST, ["ngram dtype 'i8'"]),
    "n-gram rows too many": (ngram(rows=1 << 39), MANIFEST, ["more than 4096 sections"]),
    "n-gram rows of another part": (ngram(rows=1 << 24), MANIFEST, ["section 'ngram.1.0'"]),
    "n-gram rows too few": (ngram(rows=16), MANIFEST, ["fewer rows than"]),
    "n-gram row size": (ngram(row_bytes=8), MANIFEST, ["row and page sizes"]),
    "n-gram page size": (ngram(page_bytes=8192), MANIFEST, ["row and page sizes"]),
    "n-gram offset between pages": (ngram(offset=100), MANIFEST, ["section 'ngram.1.0'", "no multiple of a page"]),
    "n-gram constants of unequal length": (ngram(head_offsets=[0]), MANIFEST, ["unequal"]),
    "n-gram constants too few": (ngram(multipliers=[3, 5]), MANIFEST, ["section 'ngram.1'", "not the config's"]),
    "n-gram table twice": (
        body(lambda b: b["ngram"].append(dict(b["ngram"][0]))), MANIFEST, ["two n-gram tables of one layer"],
    ),
    "experts missing": (lambda p: (p / EXPERTS).unlink(), EXPERTS, ["No such file"]),
    "experts cut": (cut(EXPERTS), EXPERTS, ["section 'experts.4'", "truncated"]),
    "experts cut to nothing": (lambda p: os.truncate(p / EXPERTS, 0), EXPERTS, ["section 'experts.0'", "truncated"]),
    "n-grams cut": (cut(NGRAM, 4096), NGRAM, ["section 'ngram.1.0'", "truncated"]),
    "n-grams linked elsewhere": (link, NGRAM, ["cannot be opened", "a symbolic link"]),
    "experts with more": (append(EXPERTS), EXPERTS, ["section 'experts.4'", "wanted"]),
    "n-grams with more": (append(NGRAM), NGRAM, ["section 'ngram.1.0'", "wanted"]),
    "tokenizer cut": (cut("tokenizer.json"), "tokenizer.json", ["section 'file.tokenizer.json'", "truncated"]),
    "tokenizer with more": (append("tokenizer.json"), "tokenizer.json", ["section 'file.tokenizer.json'", "wanted"]),
    "dense cut": (cut(DENSE), DENSE, ["section 'dense'", "truncated"]),
    "dense with more": (append(DENSE), DENSE, ["section 'dense'", "wanted"]),
    "dense tensor renamed": (dense(lambda h: h.__setitem__("a", h.pop(EMBED))), DENSE, [EMBED, "is missing"]),
    "dense tensor of another dtype": (dense(lambda h: h[EMBED].update(dtype="F16")), DENSE, [EMBED, "dtype F16"]),
    "dense tensor transposed": (dense(lambda h: h[EMBED].update(shape=[64, 300])), DENSE, [EMBED, "[64, 300]"]),
    "dense dtype of a list unknown": (dense(lambda h: h[NORM].update(dtype="F8_E5M2")), DENSE, [NORM, "F8_E5M2"]),
    "dense offset past the end": (
        dense(lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 64])), DENSE, [NORM, "truncated"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_spoiled_pack_is_refused_when_it_is_opened(good, tmp_path, case):
    spoil, file, parts = CASES[case]
    path = tmp_path / "pack"
    shutil.copytree(good, path)
    spoil(path)
    with pytest.raises(PackError) as refusal:
        Pack.open(path)
    assert Path(refusal.value.file).name == file
    for part in parts:
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not held(path), "a refused pack keeps no file open"


@pytest.mark.parametrize(
    ("file", "name"),
    [(EXPERTS, "experts.0"), (EXPERTS, "experts.4"), (NGRAM, "ngram.1.0"), (DENSE, "dense"),
     ("tokenizer.json", "file.tokenizer.json")],
)  # fmt: skip
def test_one_flipped_bit_is_found_by_verify(good, tmp_path, file, name):
    path = tmp_path / "pack"
    shutil.copytree(good, path)
    with Pack.open(path) as pack:
        at = next(s for s in pack.manifest.sections if s.name == name)
    with (path / file).open("r+b") as spoilt:
        spoilt.seek(at.offset + at.bytes - 1)
        byte = spoilt.read(1)[0]
        spoilt.seek(at.offset + at.bytes - 1)
        spoilt.write(bytes([byte ^ 0x10]))
    with Pack.open(path) as pack, pytest.raises(PackError, match="SHA-256") as refusal:
        pack.verify()
    assert refusal.value.section == name
    assert Path(refusal.value.file).name == file


def test_every_flipped_bit_of_a_manifest_is_refused(good, tmp_path):
    data = (good / MANIFEST).read_bytes()
    for position in range(0, len(data), 7):
        for bit in (0, 5, 7):
            spoilt = data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
            with pytest.raises(PackError):
                manifest.decode(spoilt, tmp_path / MANIFEST)


def test_every_cut_of_a_manifest_is_refused(good, tmp_path):
    data = (good / MANIFEST).read_bytes()
    for length in range(0, len(data), 11):
        with pytest.raises(PackError):
            manifest.decode(data[:length], tmp_path / MANIFEST)


def test_a_file_that_shrinks_after_opening_is_noticed(good, tmp_path):
    path = tmp_path / "pack"
    shutil.copytree(good, path)
    with Pack.open(path) as pack:
        os.truncate(path / EXPERTS, 4096)
        with pytest.raises(PackError, match="became shorter"):
            pack.verify()


def test_a_manifest_comes_back_as_it_was(good):
    data = (good / MANIFEST).read_bytes()
    decoded = manifest.decode(data)
    assert manifest.encode(decoded) == data
    assert manifest.finished(decoded) == decoded
