"""Resident-only routing on a real model and on real lanes: off is exact to the bit, on says what it replaced."""

from __future__ import annotations

import json

import pytest
import torch

from bench import prefill_routing
from bench.prefill_routing import Rig
from laneproto.v1 import lane_pb2 as pb
from lanes.state.snapshot import tenant_key
from shared_experts.pack import Pack
from tests.fakes.processes import Host, tiny_pack
from tests.fakes.serving import wait_for

PROMPT = [(k * k * 31 + k * 17) % 512 for k in range(300)]


@pytest.fixture
def rig(tmp_path):
    with Pack.open(tiny_pack(tmp_path)) as pack:
        made = []

        def make(share):
            info = pack.manifest.experts
            made.append(Rig(pack, int(share * info.layers * info.experts) * info.record_bytes, 1, 64, 400))
            made[-1].rows(PROMPT[::-1], made[-1].pool.open(400))
            return made[-1]

        yield make
        for one in made:
            one.kernel.close()


def known(stub):
    return stub.Prefixes(pb.PrefixesRequest())


def read(rig, *, steered):
    slot = rig.pool.open(400)
    logits = rig.rows(PROMPT, slot, steered=steered)
    rig.pool.close(slot)
    return logits


def test_without_it_a_steered_window_is_exact_to_the_bit(rig):
    made = rig(0.5)
    made.model.near = None
    assert torch.equal(read(made, steered=True), read(made, steered=False))
    assert made.counters.prompt_choices == 0


def test_with_everything_resident_it_is_exact_to_the_bit(rig):
    made = rig(1.0)
    made.policy.holds = True
    made.cache.resident[:] = True  # what it says; the bytes are the same wherever they lie
    assert torch.equal(read(made, steered=True), read(made, steered=False))
    assert made.counters.prompt_choices > 0
    assert made.counters.replaced_choices == 0


def test_with_half_of_them_nothing_is_fetched_and_the_rest_is_counted(rig):
    made = rig(0.5)
    made.policy.holds = True
    assert made.cache.resident[:4].sum(1).min() >= 4  # decoder layers
    exact = read(made, steered=False)
    before = made.counters.expert_misses
    near = read(made, steered=True)
    assert made.counters.expert_misses == before
    assert 0 < made.counters.replaced_choices < made.counters.prompt_choices
    assert near.isfinite().all()
    assert not torch.equal(near, exact)
    assert torch.equal(near, read(made, steered=True)), "as repeatable as any reading"


def test_states_of_either_kind_are_no_state_of_the_other():
    assert tenant_key(b"t") != tenant_key(b"t", b"vram")
    assert tenant_key(b"t", b"vram") != tenant_key(b"u", b"vram")


def test_the_bench_gives_its_figures(tmp_path):
    few = ["--shares", "0.5", "--prompts", "1", "--prompt-tokens", "32", "--next-tokens", "8", "--answer-tokens", "4",
           "--warm-tokens", "64", "--out", str(tmp_path / "out.json")]  # fmt: skip
    assert prefill_routing.main([str(tiny_pack(tmp_path)), *few]) == 0
    (share,) = json.loads((tmp_path / "out.json").read_text())["shares"]
    assert set(share["perplexity"]) == {"exact", "vram"}
    assert 0 < share["next_token_agreement"] <= 1


def test_lanes_say_how_they_read(tmp_path):
    with Host(tiny_pack(tmp_path), tmp_path) as host:
        host.owner("--park", str(64 << 20))
        park = ("--park", str(host.run / "park.sock"), "--vram-budget", "128KiB", "--drafts", "0")
        lanes = [host.lane("lane-0", *park), host.lane("lane-1", *park, "--prefill-routing", "vram")]
        for lane in lanes:
            lane.until("lane_ready")
        exact, said = host.ask("lane-0", prompt_ids=PROMPT, max_tokens=8)
        assert not said.usage.approximations
        assert (said.usage.prompt_choices, said.usage.replaced_choices) == (0, 0)
        assert host.ask("lane-0", prompt_ids=[*PROMPT, *exact, 5], max_tokens=2)[1].usage.cached_tokens > 300
        with host.stub("lane-1") as stub:  # it hears of what the pool has
            wait_for(lambda: any(p.place == pb.PREFIX_PLACE_PARKED for p in next(iter(known(stub))).added))
        host.ask("lane-1", prompt_ids=PROMPT[::-1], max_tokens=40)  # its cache fills
        for cached in (0, 299):  # of its own it goes on; what the exact lane has parked is none of its
            _, said = host.ask("lane-1", prompt_ids=[*PROMPT, 9], max_tokens=2, checkpoint_positions=[299])
            assert list(said.usage.approximations) == ["prefill-routing-vram"]
            assert said.usage.cached_tokens == cached
            assert said.usage.prompt_choices == (301 - cached) * 4 * 4  # layers, experts a token
            assert said.usage.replaced_choices > 0 or cached
