"""A lane on a GPU without a GPU: the same launches in Triton's interpreter, against the lane on the CPU.

tests/gpu has the same cases, compiled and captured.
"""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from bench import exactness, exactness_cases, exactness_guesses, exactness_margins, exactness_states
from bench.exactness_cases import Ground
from bench.gpu_lane_rig import CONTEXT, cpu_lane, gpu_lane, small_pack, wide_tiles
from bench.near_tie import Apart, apart
from lanes import limits
from lanes.experts.gpu.pace import LayerPace
from lanes.models.errors import WindowError
from lanes.models.load import dense_bytes
from lanes.models.qwen4_exp.gpu import window
from lanes.models.qwen4_exp.gpu.guessing import Guessing
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Connected
from lanes.startup_cuda import divide
from lanes.tolerance import BF16, Tolerance
from lanes.window import Window
from shared_experts.pack import Pack

PROMPT = 50  # tokens: more blocks than are read
DEMO = Path(__file__).parents[2] / "deploy/demo_model/pack"

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("one_thread", "unwritten", "large_tiles"),
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    with small_pack(tmp_path_factory.mktemp("pack")) as pack:
        yield pack


def ground(pack, rest: int, prompt: int = PROMPT) -> Ground:
    """Random ids, of which windows read the rest: across the end of a block, with more blocks than are read."""
    ids = random.Random(1).choices(range(2, 300), k=prompt + rest)
    return Ground(pack, "cpu", ids, prompt, CONTEXT)


@pytest.mark.slow
def test_windows_of_every_size_as_on_the_cpu(pack):
    exactness_margins.against_the_cpu(ground(pack, 6))


@pytest.mark.slow
def test_rejected_and_dropped_drafts_have_not_happened(pack, monkeypatch):
    monkeypatch.setattr(exactness_margins, "TRIALS", [(3, 1), (3, 0)])
    exactness_margins.drafted(ground(pack, 3))


@pytest.mark.slow
def test_sequences_take_turns_in_the_seat(pack):
    exactness_states.turns(ground(pack, 2))


def test_a_branch_sits_down_with_its_roots_rows(pack):
    exactness_states.branches(ground(pack, 1))


@pytest.mark.slow
def test_guesses_as_on_the_cpu(pack):
    exactness_guesses.guesses(ground(pack, 3))


@pytest.mark.slow
def test_guesses_after_a_silence_and_after_a_wrong_one(pack):
    exactness_guesses.late_guesses(ground(pack, 7))


@pytest.mark.slow
def test_a_guess_at_a_wrong_place_is_found(pack, monkeypatch):
    say = Guessing._say
    monkeypatch.setattr(Guessing, "_say", lambda self, said, ids, start: say(self, said, ids, start - (len(ids) > 1)))
    with pytest.raises(Apart):
        exactness_guesses.guesses(ground(pack, 5))


@pytest.mark.slow
def test_streams_that_guesses_read_as_on_the_cpu(pack):
    exactness_guesses.streams(ground(pack, 3))


@pytest.mark.slow
def test_what_is_cached_changes_no_bit(pack):
    on = ground(pack, 2)
    plain, caching = (on.lane(slots=slots) for slots in (0, 1000))
    want = on.said(plain)
    for _ in range(2):
        exactness_cases.bit_equal(on.said(caching), want)
        caching.experts.settle()  # as the end of an answer does: plans lag by a window
    assert caching.counters.expert_hits > 0


@pytest.mark.slow
def test_what_feeds_a_prompt_changes_no_bit(pack, monkeypatch):
    monkeypatch.setattr(exactness_cases, "RINGS", (2,))
    monkeypatch.setattr(exactness_cases, "CHUNKS", (1,))
    monkeypatch.setattr(exactness_cases, "CANCELS", (True,))
    assert int(exactness_cases.prompts(ground(pack, 1, 6)).split()[0]) > 0


@pytest.mark.slow
def test_a_state_goes_through_bytes_to_another_lane(pack):
    assert exactness_states.parked(ground(pack, 3, 42)).endswith("bytes of 43 tokens")


@pytest.mark.slow
def test_what_rejected_rows_held_changes_no_bit(pack, monkeypatch):
    """From an open block into the next one, beyond what is read."""
    monkeypatch.setattr(exactness_cases, "TRIALS", [(3, 1)])
    assert exactness_cases.rejected(ground(pack, 3, 41)) == "2 rows"


@pytest.mark.slow
def test_a_prompt_then_windows_then_a_settled_state(pack):
    """A prompt through the eager blocks; afterwards the state is what a lane on the CPU has."""
    ids = random.Random(5).choices(range(2, 300), k=8)
    lanes = [cpu_lane(pack), gpu_lane(pack)]
    lanes[1].prompter = None
    states = []
    for lane in lanes:
        slot = lane.begin(ids[:5])
        lane.windows(ids[5:], slot, [1, 2])
        lane.model.settle(lane.states[slot])
        states.append(lane.states[slot])
    want, got = states
    assert got.seated
    assert got.length == want.length == 8
    assert torch.equal(got.context_ids, want.context_ids)
    for ours, theirs in zip((*got.rows(0, 8), *got.fixed()), (*want.rows(0, 8), *want.fixed()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_greedy_rows_come_as_ids(pack):
    exactness_states.ids_alone(ground(pack, 4))


@pytest.mark.slow
def test_the_demo_model():
    """A row of the exactness table at its sizes: keys and values of two, an odd low rank, its own experts."""
    with Pack.open(DEMO) as pack:
        wide_tiles(pack.manifest.experts.layout)
        assert "0 other ids" in exactness_margins.against_the_cpu(exactness.ground(pack, "cpu")[0])


def test_matrices_in_bf16(pack):
    """As on a GPU; the interpreter cuts bf16 off where a GPU rounds, so twice its error is allowed."""
    on = ground(pack, 1)
    apart(on.said(gpu_lane(pack, dtype=torch.bfloat16)), on.said(on.cpu()), Tolerance(2 * BF16, 2 * BF16))


def test_what_comes_while_experts_are_waited_for_is_the_next_blocks(pack, monkeypatch):
    sent = []
    monkeypatch.setattr(window, "plan", sent.append)
    model = gpu_lane(pack).model
    blocks = [b.block for b in model._inner.blocks if isinstance(b, Connected)]
    assert [m.data_ptr() for m in sent] == [b.inputs.data_ptr() for b in blocks[2::2]]


def test_what_is_no_window(pack):
    lane = gpu_lane(pack)
    first, second = lane.states.open(CONTEXT), lane.states.open(CONTEXT)
    with pytest.raises(WindowError, match="token ids"):
        lane.model.forward(Window.of_sequence([300], 0, first), lane.states)
    with pytest.raises(WindowError, match="positions"):
        lane.model.forward(Window.of_sequence([3], 1, first), lane.states)
    both = Window.of_rows(
        torch.tensor([3, 4]), torch.tensor([0, 0]), torch.tensor([first, second]), torch.tensor([True, True])
    )
    with pytest.raises(WindowError, match="one sequence"):
        lane.model.forward(both, lane.states)


def test_another_tenant_finds_nothing(pack, monkeypatch):
    lane, erased = gpu_lane(pack), []
    monkeypatch.setattr(type(lane.model._host), "erase", lambda host: erased.append(host))
    slot = lane.begin([7, 8, 9])
    first = lane.windows([5], slot, [1])
    lane.model.erase()
    lane.experts.erase()
    assert erased == [lane.model._host]
    window = lane.model._window
    for part in (window._streams, window._moe, window._attention, window._delta, *window._settling):
        assert not any(tensor.any() for tensor in part.tensors())
    assert not window.logits.any()
    assert first.any()
    lane.windows([6], slot, [1])  # and the state that was there goes on


def test_another_tenant_finds_nothing_of_a_guess(pack):
    lane = gpu_lane(pack, drafts=True)
    slot, guessing = lane.begin([7, 8, 9]), lane.model._guessing
    assert len(lane.model.guess(lane.states[slot], 5, 0, best=2)) == 2
    asked = guessing._pass
    kept = (asked._head, asked._embedding, asked._waiting)  # the last one is the state's
    tensors = [value for value in vars(asked).values() if isinstance(value, torch.Tensor)]
    tensors = [each for each in tensors if not any(each is one for one in kept)]
    tensors += [each for part in (asked._streams, asked._attended, asked._routed) for each in part.tensors()]
    tensors += [each.buffer for each in (asked.said, asked.inputs, asked.said_late, asked._inputs_late)]
    tensors += [each.buffer for each in asked.said_further]
    assert sum(bool(each.any()) for each in tensors) > 10
    lane.model.erase()
    assert not any(each.any() for each in tensors)
    assert guessing._guessed is None


def test_what_dense_weights_take_is_known_before(pack):
    lane = gpu_lane(pack)
    inner = lane.model._inner
    held = {id(inner.head): inner.head.nbytes}
    for block in (*inner.blocks, inner.mixer):
        for part in (block, getattr(block, "mixer", None), getattr(block, "block", None)):
            for value in vars(part).values() if part is not None else ():
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    found, small = dense_bytes(pack), 0.02 * sum(held.values())
    assert abs(found - sum(held.values())) <= small
    assert dense_bytes(pack, drafts=True) > found


def test_a_chunk_is_planned_for(pack):
    spec = Spec.from_config(pack.manifest.config)
    config = SimpleNamespace(vram_budget_bytes=4 << 30, prefill_chunk_rows=None)
    opened = SimpleNamespace(config=config, pack=pack, draft_layer=False)
    # Everything fits this cache: nothing crosses the link, whatever its rate.
    divided, chunk = divide(opened, spec, 0, LayerPace(1e3, 1e-9))
    assert (chunk.rows, divided.slots) == (256, pack.manifest.experts.layers * pack.manifest.experts.experts)
    row_bytes = (divided.needs.workspace_bytes - limits.CUDA_WORKSPACE_BYTES) // 256
    config.prefill_chunk_rows = 1024
    divided, chunk = divide(opened, spec, 0, LayerPace(1e3, 1e-9))
    assert (chunk.rows, divided.needs.workspace_bytes) == (1024, limits.CUDA_WORKSPACE_BYTES + 1024 * row_bytes)
    assert (divided.needs.lent_bytes, divided.spare) == (0, 0)
    config.prefill_chunk_rows = 8192  # and a budget that it has to share with the cache
    config.vram_budget_bytes += 7168 * row_bytes - divided.left_bytes - divided.cache_bytes // 2
    divided, chunk = divide(opened, spec, 0, LayerPace(1e3, 1e-9))
    assert divided.needs.workspace_bytes == limits.CUDA_WORKSPACE_BYTES + 1024 * row_bytes
    assert divided.needs.lent_bytes == 7168 * row_bytes
    assert divided.spare == divided.slots // 2
