"""Guesses that the device makes by itself, each the next one's input, against the same ones asked for one by one."""

import pytest
import torch
import triton

from bench.gpu_lane_rig import gpu_lane, small_pack
from lanes import limits
from lanes.models.qwen4_exp.gpu import guessing
from tests.fakes.large_tiles import widened

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("one_thread"),
]
IDS = [7, 8, 9, 30, 31, 200, 12, 13, 14]
NARROW = tuple(range(5, 290, 3))  # a draft vocabulary


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    with small_pack(tmp_path_factory.mktemp("pack")) as pack:
        yield pack


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch, pack):
    widened(monkeypatch, pack.manifest.experts.layout)


def named(place: int, narrow: bool) -> int:
    return NARROW[place] if narrow else place


def one_by_one(lane, state, token: int, count: int, narrow: bool) -> list:
    found = []
    for number in range(count):
        ((place, share),) = lane.model.guess(state, token, number, best=1)
        found.append((place, share))
        token = named(place, narrow)
    return found


def same_state(mine, its, guesses: int) -> None:
    """All that a draft layer keeps, also what guesses have written past the end."""
    assert (mine.length, mine.draft.waiting) == (its.length, its.draft.waiting)
    waiting = mine.draft.waiting
    assert torch.equal(mine.draft.streams[:waiting], its.draft.streams[:waiting])
    assert torch.equal(mine.draft.ids[:waiting], its.draft.ids[:waiting])
    layer = max(mine.attention)
    rows = mine.length - 1 + guesses
    for ours, theirs in zip(mine.attention[layer].of(0, rows), its.attention[layer].of(0, rows), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("narrow", "rounds"), [
    (False, ((3, 1), (2, 3), (1, 1))), (True, ((3, 4), (2, None), (2, 1))),
])  # fmt: skip
def test_guesses_at_once_are_those_one_by_one(pack, narrow, rounds):
    lanes = [gpu_lane(pack, drafts=True) for _ in range(2)]
    assert all(lane.model.chains for lane in lanes)
    slots = [lane.begin(IDS) for lane in lanes]
    mine, its = (lane.states[slot] for lane, slot in zip(lanes, slots, strict=True))
    for lane in lanes:
        if narrow:
            lane.model.narrow_guesses(NARROW)
    token = 40
    # Then a window has so many rows of them that were right, or a silence follows.
    for count, right in rounds:
        found = lanes[0].model.guess(mine, token, 0, best=count)
        assert found == one_by_one(lanes[1], its, token, count, narrow)
        assert all(place >= 0 and 0 < share <= 1 for place, share in found)
        same_state(mine, its, count)
        drafts = [named(place, narrow) for place, _ in found]
        for lane, slot in zip(lanes, slots, strict=True):
            lane.experts.end_window()
            if right is None:
                lane.windows([60, 61, 62], slot, [1])
            else:
                lane.trial([token, *drafts], slot, right)
        same_state(mine, its, 0)
        token = (token * 7 + 1) % 290


def test_what_is_no_number_ends_the_chain(pack):
    lane = gpu_lane(pack, drafts=True)
    state, head = lane.states[lane.begin(IDS)], lane.model._guessing._pass._head
    wrong = head[5].clone()
    assert lane.model.guess(state, 40, 0, best=2)[1][0] >= 0
    asked, run = lane.model._guessing._pass, lane.model._guessing._pass.run

    def spoilt(rows, number, *, named=False):
        head[5] = float("nan") if number == 1 else wrong
        run(rows, number, named=named)

    asked.run = spoilt
    found = lane.model.guess(state, 40, 0, best=3)
    assert found[0][0] >= 0
    assert found[1:] == [(-1, 0.0)] * 2
    head[5] = wrong


def test_a_layer_whose_embedding_no_kernel_reads_guesses_one_by_one(pack, monkeypatch):
    lane = gpu_lane(pack, drafts=True)
    state = lane.states[lane.begin(IDS)]
    lane.model.guess(state, 9, 0)  # from here on one row waits
    want = lane.model.guess(state, 40, 0, best=3)
    monkeypatch.setattr(lane.model._guessing, "chains", False)
    assert not lane.model.chains
    assert lane.model.guess(state, 40, 0, best=3) == want[:1]
    assert lane.model.guess(state, want[0][0], 1, best=2) == want[1:2]


def test_all_passes_are_there_for_graphs():
    assert len({*guessing.FIRST, *guessing.FURTHER, *guessing.NAMED}) == 4 + 2 * (limits.MAX_DRAFTS - 1)
