"""The draft vocabulary: chosen from a text by the tool, read with bounds by a lane, used by the draft layer's head."""

import json
import os

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bench.tiny_model import TinyConfig
from coordinator.cli import commands
from coordinator.draft_vocabulary import choose
from lanes import limits
from lanes.drafts.vocabulary import read
from lanes.errors import StartError
from lanes.models import load_model
from lanes.state.sequence import SequenceState
from lanes.window import Window
from shared_experts.convert import convert
from tests.fakes.checkpoints import SMALL, small_checkpoint
from tests.fakes.reference_model import naive_experts, pack_of


def test_the_most_frequent_ids_and_the_ends():
    chosen = choose([5, 5, 5, 2, 2, 9, 9, 7, 1, 8], 4, always=(300,))
    assert chosen.ids == (2, 5, 9, 300)
    assert chosen.counted == pytest.approx(7 / 9)  # 8 is the last tenth
    assert chosen.held_out == 0.0


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 60), st.sets(st.integers(0, 99), max_size=5))
def test_any_text(ids, size, always):
    chosen = choose(ids, size, always)
    assert list(chosen.ids) == sorted(set(chosen.ids))
    assert len(chosen.ids) <= size
    assert set(chosen.ids) <= set(ids) | always
    assert always <= set(chosen.ids) or len(always) > size
    assert 0 <= chosen.held_out <= 1
    counted = ids[: len(ids) - len(ids) // 10]
    left_out = set(counted) - set(chosen.ids)
    ordinary = [token for token in chosen.ids if token not in always]
    if left_out and ordinary:
        assert min(map(counted.count, ordinary)) >= max(map(counted.count, left_out))


def written(folder, value):
    path = folder / "v.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_good_file(tmp_path):
    assert read(written(tmp_path, {"draft_vocabulary": 1, "ids": [0, 3, 99]}), 100) == (0, 3, 99)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "Expecting"), ("[1, 2]", "not a draft vocabulary"), ({"ids": [1]}, "not a draft vocabulary"),
        ({"draft_vocabulary": 2, "ids": [1]}, "not a draft vocabulary"),
        ({"draft_vocabulary": 1, "ids": []}, "not a draft vocabulary"),
        ({"draft_vocabulary": 1, "ids": [1, 1]}, "ascending"), ({"draft_vocabulary": 1, "ids": [2, 1]}, "ascending"),
        ({"draft_vocabulary": 1, "ids": [1, True]}, "whole numbers"),
        ({"draft_vocabulary": 1, "ids": [1, 2.0]}, "whole numbers"),
        ({"draft_vocabulary": 1, "ids": [-1, 2]}, "not in the model's vocabulary of 100"),
        ({"draft_vocabulary": 1, "ids": [1, 100]}, "not in the model's vocabulary of 100"),
        ("[" * 100_000, "v.json"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name(tmp_path, value, said):
    with pytest.raises(StartError, match=said):
        read(written(tmp_path, value), 100)


def test_a_file_of_the_limit_and_one_byte_more(tmp_path, monkeypatch):
    path = written(tmp_path, {"draft_vocabulary": 1, "ids": [1]})
    monkeypatch.setattr(limits, "DRAFT_VOCABULARY_BYTES", path.stat().st_size)
    assert read(path, 100) == (1,)
    monkeypatch.setattr(limits, "DRAFT_VOCABULARY_BYTES", path.stat().st_size - 1)
    with pytest.raises(StartError, match="over"):
        read(path, 100)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "missing"):
        with pytest.raises(StartError, match="--draft-vocab"):
            read(tmp_path / name, 100)


def test_the_tool_on_a_pack_and_a_lane_reads_what_it_wrote(tmp_path):
    convert(small_checkpoint(tmp_path / "c", tokenizer=True), tmp_path / "pack", experts="q4g32", threads=1)
    text, out = tmp_path / "text", tmp_path / "v.json"
    text.write_text("the cat and the hat and the bat\n" * 50)
    words = ["draft-vocab", str(tmp_path / "pack"), str(text), "--out", str(out), "--size", "12", "--json"]
    said = json.loads(CliRunner().invoke(commands, words, standalone_mode=False, catch_exceptions=False).stdout)
    ids = read(out, SMALL.vocab_size)
    assert said["ids"] == len(ids) <= 12
    assert said["coverage_held_out"] > 0.5
    assert isinstance(CliRunner().invoke(commands, words, standalone_mode=False).exception, FileExistsError)
    words[words.index(str(out))] = str(tmp_path / "text2")
    plain = CliRunner().invoke(commands, words[:-1], standalone_mode=False)
    assert "of its last tenth" in plain.stdout


def test_a_narrow_head_names_the_same_logits(tmp_path):
    source = small_checkpoint(tmp_path / "c", TinyConfig(num_hidden_layers=4, num_experts=8))
    with pack_of(source, "f32") as pack:
        model = load_model(pack, naive_experts(pack), drafts=True)
        states = {0: SequenceState(model.state_shape, 20)}
        model.forward(Window.of_sequence([5, 6, 7], 0, 0), states)
        whole = model.guess(states[0], 9, 0)
        ids = (3, 8, 200, 511)
        model.narrow_guesses(ids)
        assert torch.allclose(model.guess(states[0], 9, 0), whole[list(ids)], atol=1e-5)
