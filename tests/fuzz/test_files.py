"""Files that others wrote: the parsers read them or refuse them in their own words, nothing else."""

import hashlib
import itertools
import json
import struct
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from bench.tokenizer import write_tokenizer
from coordinator import limits as coordinator_limits
from coordinator.errors import BadTokenizer
from coordinator.generation_config import GenerationConfig
from coordinator.text.renderer import IM_END, IM_START
from coordinator.text.tokenizer import Tokenizer
from lanes.errors import TraceRefused
from lanes.experts.policy import Touched
from lanes.experts.trace import TraceHeader, TraceWriter, read_trace
from shared_experts import golden, limits, manifest
from shared_experts.checkpoint import INDEX, SINGLE, Checkpoint
from shared_experts.convert import convert
from shared_experts.errors import CheckpointError, PackError
from shared_experts.journal import Ingredients, Journal
from shared_experts.manifest import Section
from shared_experts.safetensors_reader import DTYPE_BYTES, SafetensorsFile
from tests.fakes.checkpoints import read_header, small_checkpoint
from tests.fakes.descriptors import held
from tests.fuzz.inputs import JSON_VALUES, MSGPACK_VALUES, altered, either, spoilt
from tests.fuzz.loop import fuzz


def to_json(value):
    return json.dumps(value).encode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("fuzz") / "checkpoint")


@pytest.fixture(scope="module")
def packed(checkpoint):
    convert(checkpoint, checkpoint.parent / "pack", experts="f32", threads=1)
    return (checkpoint.parent / "pack" / "manifest.msgpack").read_bytes()


def test_safetensors_header(tmp_path):
    file = tmp_path / "some.safetensors"
    good = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [32, 33]},
    }

    def encode(header):
        text = to_json(header)
        return len(text).to_bytes(8, "little") + text + bytes(33)

    def check(data):
        file.write_bytes(data)
        with SafetensorsFile(file, lambda reason, tensor=None: CheckpointError(file, reason, tensor=tensor)) as read:
            end = 8 + int.from_bytes(data[:8], "little")
            for info in sorted(read.tensors.values(), key=lambda info: (info.offset, info.bytes)):
                assert info.bytes == np.prod(info.shape, dtype=object) * DTYPE_BYTES[info.dtype]
                assert info.offset == end, "every byte belongs to one tensor"
                end += info.bytes
                assert read.read(info, 0, info.bytes, memoryview(bytearray(info.bytes + 8192))).nbytes == info.bytes
            assert end == len(data)

    fuzz(either(good, JSON_VALUES, encode), check, (CheckpointError,))


def test_config(checkpoint):
    file = checkpoint / "config.json"
    good = file.read_bytes()

    def check(data):
        file.write_bytes(data)
        with Checkpoint.open(checkpoint) as opened:
            assert opened.text.layers
            assert opened.expert_layers == len(opened.text.layers) + opened.draft_layers
            json.dumps(opened.config, allow_nan=False).encode()

    try:
        fuzz(either(json.loads(good), JSON_VALUES, to_json), check, (CheckpointError,))
    finally:
        file.write_bytes(good)


def test_index(tmp_path):
    folder = small_checkpoint(tmp_path / "checkpoint")
    (folder / SINGLE).rename(folder / "a.safetensors")
    names = sorted(read_header(folder / "a.safetensors")[0].keys() - {"__metadata__"})
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}

    def check(data):
        (folder / INDEX).write_bytes(data)
        try:
            with Checkpoint.open(folder) as opened:
                assert set(json.loads(data)["weight_map"]) == set(names)
                assert opened.text.layers
        finally:
            assert not held(folder), "a refused checkpoint keeps no file open"

    fuzz(either(index, JSON_VALUES, to_json), check, (CheckpointError,))


def test_manifest(packed):
    """The digests are made good again, so that what was altered reaches its check."""
    whole = msgpack.unpackb(packed)

    def encode(body):
        if isinstance(body.get("sections"), list) and body.get("config") is not None:
            body = {**body, "fingerprint": _fingerprint(body)}
        data = msgpack.packb(body)
        return msgpack.packb({**whole, "body": data, "sha256": hashlib.sha256(data).digest()})

    def check(data):
        read = manifest.decode(data)
        assert manifest.decode(manifest.encode(read)) == read
        assert manifest.fingerprint_of(read) == read.fingerprint
        ends = {}
        for section in sorted(read.sections, key=lambda section: (section.file, section.offset, section.bytes)):
            assert "/" not in section.file
            assert ends.get(section.file, 0) <= section.offset <= limits.SECTION_BYTES
            ends[section.file] = section.offset + section.bytes

    fuzz(either(msgpack.unpackb(whole["body"]), MSGPACK_VALUES, encode, [packed]), check, (PackError,))


def _fingerprint(body):
    """Of an altered body, where one can be computed; else of none."""
    values = {**body, "ngram": (), "sections": ()}
    try:
        values["experts"] = manifest.ExpertsInfo(**body["experts"])
        values["sections"] = tuple(Section(**section) for section in body["sections"])
        return manifest.fingerprint_of(manifest.Manifest(**values))
    except (TypeError, AttributeError, KeyError, ValueError):
        return bytes(32)


def test_golden_record():
    record = golden.GoldenRecord(
        "ab" * 32, (1, 2, 3), (golden.StepLogits(2.0, 1.0, ((7, 2.0), (8, -1.5))),), 0.25,
        (golden.ExpertDigest(0, 1, "cd" * 32),), "tests",
    )  # fmt: skip
    whole = json.loads(golden.encode(record))

    def encode(body):
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return to_json({**whole, "body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()})

    def check(data):
        read = golden.decode(data, lambda reason: PackError("golden.json", reason))
        assert golden.decode(golden.encode(read), lambda reason: PackError("again", reason)) == read

    fuzz(either(whole["body"], JSON_VALUES, encode), check, (PackError,))


def test_journal(tmp_path):
    """No journal is refused: what cannot be read does not count, and the next line can be written."""
    path = tmp_path / "journal"
    made_of = Ingredients("expressway 0", "0" * 64, "q4g32", "bf16")
    section = Section("experts.0", "experts.bin", 0, 4096, bytes(32))
    journal = Journal(path)
    journal.start(made_of)
    journal.begin("experts.0")
    journal.finish(section)
    journal.close()
    good = path.read_bytes()
    entries = [json.loads(line.partition(b" ")[2]) for line in good.splitlines()]

    def line(entry):
        text = to_json(entry)
        return hashlib.sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n"

    class Nothing(Exception):
        pass

    def check(data):
        path.write_bytes(data)
        read = Journal(path)
        try:
            kept = path.read_bytes()
            assert data.startswith(kept), "only a tail is cut off"
            assert all(line(json.loads(k.partition(b" ")[2])) for k in kept.splitlines())
            read.finish(replace(section, name="after"))
        finally:
            read.close()
        again = Journal(path)
        again.close()
        assert again.done == read.done
        assert again.ingredients == read.ingredients
        if not read.done.keys() - {"after"}:
            raise Nothing("nothing in it counts")

    altered_lines = altered(entries, JSON_VALUES).map(lambda some: b"".join(map(line, some)))
    fuzz(altered_lines | spoilt([good]), check, (Nothing,))


def test_routing_trace(tmp_path):
    path = tmp_path / "trace"
    writer = TraceWriter(path, TraceHeader(3, 5, b"f" * 32))
    windows = [([0, 7, 12], [1, 2, 2], 2), ([4], [1], 1), ([0, 1, 5, 6, 10, 14], [4, 1, 3, 1, 1, 2], 4)]
    for keys, rows, window_rows in windows:
        writer.record(Touched(np.array(keys), np.array(rows), window_rows))
    writer.close()
    good = path.read_bytes()
    copy = tmp_path / "copy"

    def check(data):
        path.write_bytes(data)
        with read_trace(path) as (header, read):
            copy.unlink(missing_ok=True)
            again = TraceWriter(copy, header)
            for window in itertools.islice(read, 1000):
                again.record(window)
            again.close()
        whole = copy.read_bytes()
        assert data.startswith(whole), "what was read, written again, is the file but for a torn last window"

    words = st.lists(st.integers(0, 6), max_size=12)
    window = st.builds(
        lambda rows, distinct, body: struct.pack("<II", rows, distinct) + np.array(body, "<u2").tobytes(),
        st.integers(0, 4), st.integers(0, 5), words,
    )  # fmt: skip
    any_windows = st.lists(window, max_size=3).map(lambda some: good[:64] + b"".join(some))
    fuzz(spoilt([good]) | any_windows, check, (TraceRefused,))


def test_generation_config(tmp_path):
    """It never keeps a server from starting: bad fields are ignored, and what is used is in range."""
    good = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [2, 3]}

    class Ignored(Exception):
        pass

    def check(data):
        (tmp_path / "generation_config.json").write_bytes(data)
        found = GenerationConfig.load(tmp_path)
        sampling = found.defaults
        assert 0 <= sampling.temperature <= coordinator_limits.TEMPERATURE_MAX
        assert 0 < sampling.top_p <= 1
        assert 0 <= sampling.min_p <= 1
        assert 0 <= sampling.top_k <= coordinator_limits.TOP_K_MAX
        assert 0 < sampling.repetition_penalty <= coordinator_limits.REPETITION_PENALTY_MAX
        assert len(found.end_ids) <= coordinator_limits.END_IDS
        assert all(0 <= token < 1 << 32 for token in found.end_ids)
        if found == GenerationConfig():
            raise Ignored("nothing in it is used")

    fuzz(either(good, JSON_VALUES, to_json), check, (Ignored,))


def test_tokenizer(tmp_path):
    write_tokenizer(tmp_path, 300)
    file = tmp_path / "tokenizer.json"
    good = json.loads(file.read_bytes())
    texts = ("plain", bytes(range(128)).decode(), f"{IM_START}system\n{IM_END}", "\0\ud7ff\U0001f600 é")

    def check(data):
        file.write_bytes(data)
        read = Tokenizer.load(tmp_path)
        added = [token["content"] for token in json.loads(data).get("added_tokens") or []]
        special = {read.special(content) for content in added if content.strip()}
        assert len(special) == len([content for content in added if content.strip()])
        assert all(0 <= token < read.vocab_size for token in special)
        for text in texts:
            ids = read.encode(text)
            assert not special.intersection(ids)
            assert all(0 <= token < read.vocab_size for token in ids)
            [read.token_bytes(token) for token in ids]

    # What the file is mostly made of, the vocabulary, is the library's to check; the added tokens are ours.
    ours = altered(good["added_tokens"], JSON_VALUES).map(lambda added: to_json({**good, "added_tokens": added}))
    fuzz(either(good, JSON_VALUES, to_json) | ours, check, (BadTokenizer,))
