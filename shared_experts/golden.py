"""The golden record of a pack, `golden.json`: what a healthy lane answers to a fixed question.

It lies beside the manifest and names the pack's fingerprint, so that it is no section and changes no fingerprint: packs
with and without one share a region. `make` has it computed by a lane's own code, in a process of its own, while the
pack is still being written; it is never written later. Not here: how it is computed (`lanes.golden`) or compared
(`lanes.selftest`).

Invariant: a `GoldenRecord` returned by `decode` has every number finite and in range.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shared_experts import limits
from shared_experts.errors import PackError
from shared_experts.fields import Fail, Fields, parse_json
from shared_experts.safetensors_reader import open_regular

FILE_NAME = "golden.json"
VERSION = 1
CHILD_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class ExpertDigest:
    """SHA-256 of the fp32 row that one expert makes of the fixed input: the same on every processor."""

    layer: int
    expert: int
    sha256: str  # hexadecimal


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits after one step, in short: equal within the tolerance on every machine."""

    scale: float  # greatest absolute value
    rms: float  # root of the mean square
    top: tuple[tuple[int, float], ...]  # the greatest (token id, logit), best first


@dataclass(frozen=True, slots=True)
class GoldenRecord:
    """`steps` is empty where the model's answer moves too far when its prompt is cut otherwise."""

    fingerprint: str  # of the pack, hexadecimal
    prompt: tuple[int, ...]
    steps: tuple[StepLogits, ...]  # after the prompt, then after each step's best token
    spread: float  # how far this model's logits moved, of scale, when prompts were cut into other windows
    experts: tuple[ExpertDigest, ...]
    made_by: str  # versions and processor, for people


def encode(record: GoldenRecord) -> bytes:
    """The bytes of `golden.json`: a body and its digest."""
    body = asdict(record)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    whole = {"version": VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    return (json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def decode(data: bytes, fail: Fail) -> GoldenRecord:
    """Parses and checks; raises what `fail` makes."""
    whole = Fields(parse_json(data, fail), fail)
    whole.exactly(("version", "sha256", "body"))
    if whole.integer("version", 0, 1 << 31) != VERSION:
        whole.refuse(f"golden record version {whole.values['version']} is not read; this program reads {VERSION}")
    read = Fields(whole.values.get("body"), fail, "body")
    read.exactly(("fingerprint", "prompt", "steps", "spread", "experts", "made_by"))
    record = GoldenRecord(
        fingerprint=read.text("fingerprint", 64),
        prompt=tuple(read.integers("prompt", limits.GOLDEN_TOKENS, 0, limits.VOCABULARY)),
        steps=tuple(_step(value, fail) for value in read.sequence("steps", limits.GOLDEN_TOKENS)),
        spread=_number(read.values.get("spread"), read),
        experts=tuple(_expert(value, fail) for value in read.sequence("experts", limits.GOLDEN_EXPERTS)),
        made_by=read.text("made_by", 512),
    )
    text = json.dumps(asdict(record), sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(text.encode()).hexdigest() != whole.text("sha256", 64):
        read.refuse("the body does not have its SHA-256; the file is damaged")
    if not record.prompt or not record.experts:
        read.refuse("the golden record asks nothing")
    if not 0 <= record.spread <= 1:
        read.refuse("the golden record's spread is no part of a scale")
    return record


def read(pack: Path, fingerprint: bytes) -> GoldenRecord | None:
    """The record of the pack in this directory, or None where it has none; raises PackError for a bad one."""
    path = pack / FILE_NAME
    if not os.path.lexists(path):
        return None
    fail = functools.partial(PackError, path)
    descriptor, size = open_regular(path, fail, follow=False)
    with os.fdopen(descriptor, "rb") as file:
        if size > limits.GOLDEN_BYTES:
            raise fail(f"has {size} bytes; at most {limits.GOLDEN_BYTES} are read")
        record = decode(file.read(size), fail)
    if record.fingerprint != fingerprint.hex():
        raise fail(f"belongs to pack {record.fingerprint[:16]}, this is {fingerprint.hex()[:16]}")
    return record


def make(folder: Path, fingerprint: bytes, note: Callable[[str], None]) -> None:
    """Writes the record of a pack that lies complete in `folder`; where that cannot be done, `note` hears why.

    A pack without one is whole: lanes then test themselves without knowing the answer. So nothing here ends a
    conversion that took hours.
    """
    argv = [sys.executable, "-P", "-m", "lanes", "--golden", str(folder)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHILD_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"no golden record: {error}")
        return
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        note(f"no golden record: {last or f'exit code {done.returncode}'}")
        return
    try:
        record = decode(done.stdout, functools.partial(PackError, folder / FILE_NAME))
    except PackError as error:
        note(f"no golden record: {error.reason}")
        return
    (folder / FILE_NAME).unlink(missing_ok=True)  # of an attempt that was broken off
    descriptor = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.write(done.stdout)
        file.flush()
        os.fsync(file.fileno())
    assert record.fingerprint == fingerprint.hex(), "it was made of the pack that lies there"
    if not record.steps:
        note("the golden record has expert rows only: this model's logits depend too much on how a prompt is cut")


def _step(value: object, fail: Fail) -> StepLogits:
    read = Fields(value, fail, "step")
    read.exactly(("scale", "rms", "top"))
    top = []
    for pair in read.sequence("top", limits.GOLDEN_TOP):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0:
            read.refuse("step.top must hold pairs of token id and logit")
        top.append((pair[0], _number(pair[1], read)))
    if not top:
        read.refuse("step.top is empty")
    return StepLogits(_number(read.values.get("scale"), read), _number(read.values.get("rms"), read), tuple(top))


def _expert(value: object, fail: Fail) -> ExpertDigest:
    read = Fields(value, fail, "expert")
    read.exactly(("layer", "expert", "sha256"))
    return ExpertDigest(
        read.integer("layer", 0, limits.LAYERS), read.integer("expert", 0, limits.EXPERTS), read.text("sha256", 64)
    )


def _number(value: object, read: Fields) -> float:
    if type(value) is not float or not math.isfinite(value):
        read.refuse(f"a figure must be a finite number, not {value!r:.40}")
    assert isinstance(value, float)
    return value
