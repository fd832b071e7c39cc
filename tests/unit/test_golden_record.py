"""`golden.json`: read as it was written, or refused with the file and the reason."""

import contextlib
import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts import golden, limits
from shared_experts.errors import PackError
from shared_experts.golden import ExpertDigest, GoldenRecord, StepLogits, decode, encode, read

FINGERPRINT = b"\x05" * 32
RECORD = GoldenRecord(
    FINGERPRINT.hex(),
    (1, 2, 3),
    (StepLogits(4.0, 1.5, ((7, 4.0), (9, -0.25))),),
    1e-5,
    (ExpertDigest(0, 3, "ab" * 32),),
    "a test",
)


def refuse(reason):
    return PackError("golden.json", reason)


def spoilt(change):
    """A record whose digest is right and whose body is not."""
    whole = json.loads(encode(RECORD))
    change(whole["body"])
    text = json.dumps(whole["body"], sort_keys=True, separators=(",", ":"))
    whole["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(whole).encode()


def test_what_is_written_is_read():
    assert decode(encode(RECORD), refuse) == RECORD


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.update(extra=1), "unknown key"),
        (lambda b: b.pop("steps"), "steps is missing"),
        (lambda b: b.update(prompt=[]), "asks nothing"),
        (lambda b: b.update(experts=[]), "asks nothing"),
        (lambda b: b.update(prompt=[-1]), "prompt"),
        (lambda b: b.update(prompt=[1] * (limits.GOLDEN_TOKENS + 1)), "at most"),
        (lambda b: b.update(experts=b["experts"] * (limits.GOLDEN_EXPERTS + 1)), "at most"),
        (lambda b: b.update(spread=2.0), "spread"),
        (lambda b: b.update(spread=-0.1), "spread"),
        (lambda b: b.update(spread=1), "finite number"),
        (lambda b: b["steps"][0].update(top=[]), "empty"),
        (lambda b: b["steps"][0].update(top=[[1]]), "pairs"),
        (lambda b: b["steps"][0].update(top=[["1", 2.0]]), "pairs"),
        (lambda b: b["steps"][0].update(top=[[1, True]]), "finite number"),
        (lambda b: b["steps"][0].update(top=[[1, 1.0]] * (limits.GOLDEN_TOP + 1)), "at most"),
        (lambda b: b["steps"][0].update(scale=None), "finite number"),
        (lambda b: b["experts"][0].update(layer=limits.LAYERS + 1), "layer"),
        (lambda b: b["experts"][0].update(sha256="x" * 65), "sha256"),
        (lambda b: b.update(made_by="\ud800"), "made_by"),  # JSON can spell it, UTF-8 has no bytes for it
    ],
)
def test_a_spoilt_record_is_refused(change, reason):
    with pytest.raises(PackError, match=reason):
        decode(spoilt(change), refuse)


def test_a_record_at_its_limits_is_read():
    def fill(body):
        body["prompt"] = [limits.VOCABULARY] * limits.GOLDEN_TOKENS
        body["experts"] *= limits.GOLDEN_EXPERTS
        body["steps"][0]["top"] = [[1, 1.0]] * limits.GOLDEN_TOP

    assert len(decode(spoilt(fill), refuse).experts) == limits.GOLDEN_EXPERTS


def test_no_number_may_be_infinite():
    data = spoilt(lambda b: b["steps"][0].update(scale=1.0)).replace(b'"scale": 1.0', b'"scale": 1e999')
    with pytest.raises(PackError):
        decode(data, refuse)


@settings(max_examples=300)
@given(st.integers(0, len(encode(RECORD)) - 1), st.integers(1, 255))
def test_no_changed_byte_passes_as_another_record(place, mask):
    data = bytearray(encode(RECORD))
    data[place] ^= mask
    with contextlib.suppress(PackError):
        assert decode(bytes(data), refuse) == RECORD  # white space


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with pytest.raises(PackError):
        decode(data, refuse)


def test_a_pack_without_one_has_none_and_another_packs_is_refused(tmp_path):
    assert read(tmp_path, FINGERPRINT) is None
    (tmp_path / golden.FILE_NAME).write_bytes(encode(RECORD))
    assert read(tmp_path, FINGERPRINT) == RECORD
    with pytest.raises(PackError, match="belongs to pack"):
        read(tmp_path, b"\x06" * 32)


def test_links_and_long_files_are_refused(tmp_path):
    path = tmp_path / golden.FILE_NAME
    path.symlink_to("/dev/zero")
    with pytest.raises(PackError):
        read(tmp_path, FINGERPRINT)
    path.unlink()
    path.write_bytes(encode(RECORD).ljust(limits.GOLDEN_BYTES))
    assert read(tmp_path, FINGERPRINT) == RECORD
    path.write_bytes(encode(RECORD).ljust(limits.GOLDEN_BYTES + 1))
    with pytest.raises(PackError, match="at most"):
        read(tmp_path, FINGERPRINT)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            subprocess.CompletedProcess([], 65, b"", b"noise\nerror: start_failed: too small\n"),
            "start_failed: too small",
        ),
        (subprocess.CompletedProcess([], -9, b"", b""), "exit code -9"),
        (subprocess.TimeoutExpired("x", 1), "timed out"),
        (OSError("no interpreter"), "no interpreter"),
    ],
)
def test_a_record_that_cannot_be_made_is_a_note_and_no_file(monkeypatch, tmp_path, outcome, said):
    def run(argv, **_):
        assert argv[0] == sys.executable
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(golden.subprocess, "run", run)
    notes = []
    golden.make(tmp_path, FINGERPRINT, notes.append)
    assert len(notes) == 1
    assert said in notes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_an_attempt_before_is_replaced(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, encode(RECORD), b"")
    monkeypatch.setattr(golden.subprocess, "run", lambda argv, **_: done)
    (tmp_path / golden.FILE_NAME).write_bytes(b"half")
    notes = []
    golden.make(tmp_path, FINGERPRINT, notes.append)
    assert read(tmp_path, FINGERPRINT) == RECORD
    assert notes == []
