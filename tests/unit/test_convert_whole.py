"""A conversion is whole or not there, never overwrites, and holds only a fraction of the model in memory."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from shared_experts import convert as convert_module
from shared_experts.convert import convert
from shared_experts.errors import NoSpace, OutputExists
from tests.fakes.checkpoints import SMALL, small_checkpoint


def test_an_existing_target_is_refused_and_left_alone(tmp_path):
    small_checkpoint(tmp_path / "c")
    (tmp_path / "p").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("p", "file", "dangling"):
        with pytest.raises(OutputExists):
            convert(tmp_path / "c", tmp_path / name, experts="f32")
    assert os.listdir(tmp_path / "p") == []
    assert (tmp_path / "file").read_text() == "x"


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path):
    small_checkpoint(tmp_path / "c")

    def appear(what, done, total):
        (tmp_path / "p").mkdir(exist_ok=True)
        (tmp_path / "p" / "mine").write_text("x")

    with pytest.raises(OutputExists, match="appeared"):
        convert(tmp_path / "c", tmp_path / "p", experts="f32", progress=appear)
    assert os.listdir(tmp_path / "p") == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["c", "p"]


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    small_checkpoint(tmp_path / "c")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(NoSpace, match=f"are free|{1 << 20}"):
        convert(tmp_path / "c", tmp_path / "p", experts="f32")
    assert os.listdir(tmp_path) == ["c"]


def test_progress_reaches_the_total_and_never_falls(tmp_path):
    small_checkpoint(tmp_path / "c", tokenizer=True)
    seen = []
    manifest = convert(tmp_path / "c", tmp_path / "p", experts="q4g32", progress=lambda *step: seen.append(step))
    sections = sum(section.bytes for section in manifest.sections)
    assert {total for _, _, total in seen} == {sections}
    done = [bytes_done for what, bytes_done, _ in seen if what != "manifest.msgpack"]
    assert done == sorted(done)
    assert done[-1] == sections


MEASURED = """
import re, sys
from pathlib import Path
from shared_experts.convert import convert

def peak():  # of this program alone: ru_maxrss would start at the peak of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

convert(sys.argv[1], sys.argv[2] + "-warm", experts="q4g64", threads=2)
before = peak()
convert(sys.argv[3], sys.argv[2], experts="q4g64", threads=2)
print(peak() - before)
"""


def test_memory_of_a_conversion_is_a_fraction_of_the_model(tmp_path):
    wide = replace(
        SMALL, hidden_size=256, moe_intermediate_size=256, num_experts=48,
        ngram_vocab_size_base=60_000, ple_embed_dim=256,
    )  # fmt: skip
    small_checkpoint(tmp_path / "warm", replace(SMALL, moe_intermediate_size=64))
    small_checkpoint(tmp_path / "c", wide, layout="fused", mtp=False)
    model_bytes = (tmp_path / "c" / "model.safetensors").stat().st_size
    assert model_bytes > 200 << 20
    command = [sys.executable, "-c", MEASURED, tmp_path / "warm", tmp_path / "p", tmp_path / "c"]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    assert grown < 32 << 20  # one fused layer alone is 38 MB of fp32, the n-gram table 61 MB
