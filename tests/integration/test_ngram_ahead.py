"""Rows of n-gram tables read ahead by a lane's model: logits keep every bit, and hinted rows are there in time."""

import os

import numpy as np
import pytest
import torch

from lanes.counters import Counters
from lanes.errors import TableReadFailed
from lanes.models import load_model
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.pack import Pack
from tests.fakes.descriptors import held, threads
from tests.fakes.processes import tiny_pack
from tests.fakes.reference_model import naive_experts

PROMPT = [1, 5, 9, 300, 11, 7, 1, 401, 12, 3, 88, 5, 9, 17, 2, 4]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    torch.set_num_threads(1)
    with Pack.open(tiny_pack(tmp_path_factory.mktemp("ahead"), "f32")) as pack:
        yield pack


def logits(model, reader, hints: bool) -> list[torch.Tensor]:
    """Of a prompt in chunks of 5 and four tokens more; with hints, every read is over before a chunk begins."""
    states = StatePool(model.state_shape, model.state_shape.bytes(32))
    slot, found = states.open(32), []
    for start in range(0, len(PROMPT), 5):
        if hints:
            model.hint(PROMPT, start, min(start + 5, len(PROMPT)))
            while reader.counters().in_flight:
                os.sched_yield()
        window = Window.of_sequence(PROMPT[start : start + 5], start, slot, logits="all")
        found.append(model.forward(window, states))
    for position in range(len(PROMPT), len(PROMPT) + 4):
        found.append(model.forward(Window.of_sequence([int(found[-1][-1].argmax())], position, slot), states))
    model.forget_hints()
    states.close(slot)
    return found


def test_hints_change_no_bit_and_no_hinted_row_is_waited_for(pack):
    counters: list[Counters] = []
    answers: list[np.ndarray] = []
    for hints, cache_bytes in ((False, 0), (True, 0), (False, 1 << 20), (True, 1 << 20)):
        counters.append(Counters())
        model = load_model(pack, naive_experts(pack), ngram_cache_bytes=cache_bytes, counters=counters[-1])
        answers.append(torch.cat(logits(model, pack._readers[-1], hints)).numpy())
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    hinted, rows = counters[3], model.spec.ngram_heads * (len(PROMPT) + 4)
    assert hinted.ngram_rows == rows == counters[0].ngram_rows
    of_prompt = model.spec.ngram_heads * len(PROMPT)
    assert hinted.ngram_cache_hits + hinted.ngram_prefetch_hits >= of_prompt
    assert hinted.ngram_prefetch_hits > 0


def test_any_split_of_a_hint_names_the_rows_of_the_window(pack):
    model = load_model(pack, naive_experts(pack))
    asked: list[list[int]] = []
    for layer in model.ngrams:
        layer.table.prefetch = lambda ids: asked.append(ids.tolist())
    for start, end in ((0, len(PROMPT)), (0, 1), (1, 2), (2, 9), (15, 16)):
        model.hint(PROMPT, start, end)
    whole = asked[0]
    assert asked[1:] == [whole[0:1], whole[1:2], whole[2:9], whole[15:16]]


def test_a_closed_pack_leaves_no_thread(tmp_path):
    before = threads("table-rows")
    with Pack.open(tiny_pack(tmp_path, "f32")) as pack:
        load_model(pack, naive_experts(pack))
        assert threads("table-rows") > before
    assert threads("table-rows", before) == before
    assert not held(tmp_path)


def test_a_table_that_shrinks_ends_the_window(tmp_path):
    with Pack.open(tiny_pack(tmp_path, "f32")) as pack:
        model = load_model(pack, naive_experts(pack))
        os.truncate(pack.path / "ngram.bin", 0)
        states = StatePool(model.state_shape, model.state_shape.bytes(32))
        slot = states.open(32)
        with pytest.raises(TableReadFailed, match="layer 1"):
            model.forward(Window.of_sequence(PROMPT, 0, slot), states)
        assert states[slot].broken


def test_a_long_chunk_is_gathered_ahead_and_keeps_every_bit(pack):
    prompt = [(3 * n * n + n) % 401 for n in range(200)]
    answers = []
    for hints in (False, True):
        counters = Counters()
        model = load_model(pack, naive_experts(pack), counters=counters)
        states = StatePool(model.state_shape, model.state_shape.bytes(200))
        slot, found = states.open(200), []
        for start in (0, 100, 0, 100) if hints else ():
            model.hint(prompt, start, start + 100)  # twice is once
        for start in (0, 100):
            window = Window.of_sequence(prompt[start : start + 100], start, slot, logits="all")
            found.append(model.forward(window, states))
        model.forget_hints()
        states.close(slot)
        answers.append(torch.cat(found))
        assert counters.ngram_rows == model.spec.ngram_heads * 200
        assert counters.ngram_prefetch_hits + counters.ngram_cache_hits == counters.ngram_rows, "nobody waited"
    assert torch.equal(*answers)
