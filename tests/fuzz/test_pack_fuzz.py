"""Bytes changed at random: the parsers of checkpoints and packs read or refuse in their own words, nothing else."""

import contextlib
import hashlib
import os

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_experts import manifest
from shared_experts.checkpoint import Checkpoint
from shared_experts.convert import convert
from shared_experts.errors import CheckpointError, PackError
from tests.fakes.checkpoints import small_checkpoint

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("fuzz") / "c")


@pytest.fixture(scope="module")
def packed(checkpoint):
    convert(checkpoint, checkpoint.parent / "p", experts="f32")
    return (checkpoint.parent / "p" / "manifest.msgpack").read_bytes()


def edited(data, edits):
    changed = bytearray(data)
    for position, value in edits:
        changed[position % len(changed)] = value
    return bytes(changed)


@FUZZ
@given(edits=EDITS, cut=st.integers(0, 64))
def test_safetensors_header(checkpoint, edits, cut):
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as stream:
        length = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(0)
        good = stream.read(length)
        size = os.fstat(stream.fileno()).st_size
        stream.seek(0)
        stream.write(edited(good, edits))
        stream.truncate(size - cut)
    try:
        Checkpoint.open(checkpoint).close()
    except CheckpointError:
        pass
    finally:
        with file.open("r+b") as stream:
            stream.write(good)
            stream.truncate(size)


@FUZZ
@given(edits=EDITS)
def test_config(checkpoint, edits):
    file = checkpoint / "config.json"
    good = file.read_bytes()
    file.write_bytes(edited(good, edits))
    try:
        Checkpoint.open(checkpoint).close()
    except CheckpointError:
        pass
    finally:
        file.write_bytes(good)


@FUZZ
@given(key=st.integers(0, 30), inner=st.integers(0, 30), value=VALUES)
def test_manifest_with_any_value_anywhere(packed, key, inner, value):
    """The digest is made good again, so that the value reaches its check."""
    whole = msgpack.unpackb(packed)
    body = msgpack.unpackb(whole["body"])
    name = sorted(body)[key % len(body)]
    at = body[name]
    if isinstance(at, dict) and inner % 2:
        at[sorted(at)[inner % len(at)]] = value
    elif isinstance(at, list) and inner % 2:
        at[inner % len(at)] = value
    else:
        body[name] = value
    data = msgpack.packb(body)
    whole |= {"body": data, "sha256": hashlib.sha256(data).digest()}
    with contextlib.suppress(PackError):
        manifest.decode(msgpack.packb(whole))


@FUZZ
@given(data=st.binary(max_size=200))
def test_manifest_of_any_bytes(data):
    with pytest.raises(PackError):
        manifest.decode(data)
