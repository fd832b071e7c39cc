"""The demo model's schedule, windows, states and parts: what training relies on to stop and go on."""

import json

import numpy as np
import pytest
import torch

from bench.cache_policy import Replay
from deploy.demo_model import export, states
from deploy.demo_model.batches import Windows
from deploy.demo_model.losses import Shares, losses, total
from deploy.demo_model.model.network import How, Network
from deploy.demo_model.optimiser import TABLE_RATE, optimisers, set_rate
from deploy.demo_model.routing import figures
from deploy.demo_model.schedule import Phase, Plan
from deploy.demo_model.sizes import SMALL, parameters_used, training_flops_per_token
from lanes.experts.policy import Touched

pytestmark = pytest.mark.usefixtures("one_thread")

MAIN, FINISH = Phase(16, 4096, False, 4), Phase(2, 32768, True, 0)


def test_progress_is_the_share_of_seconds_or_steps():
    assert Plan(1e-3, 100.0, None, MAIN, FINISH).progress(25.0, 7) == 0.25
    assert Plan(1e-3, None, 50, MAIN, FINISH).progress(25.0, 5) == 0.1
    assert Plan(1e-3, 100.0, 10, MAIN, FINISH).progress(25.0, 5) == 0.5


def test_the_rate_warms_up_stays_and_falls():
    plan = Plan(2e-3, 100.0, None, MAIN, FINISH, warm_up_steps=10)
    assert plan.rate_at(0.0, 0) == pytest.approx(2e-4)
    assert plan.rate_at(0.3, 500) == plan.rate_at(plan.decay_from, 500) == 2e-3
    assert plan.rate_at(0.99, 500) < plan.rate_at(0.8, 500) < 2e-3
    assert plan.rate_at(1.0, 500) == pytest.approx(2e-3 * plan.least)


def test_the_finish_begins_at_its_share():
    plan = Plan(1e-3, 100.0, None, MAIN, FINISH)
    assert plan.phase_at(plan.finish_from - 1e-9) == MAIN
    assert plan.phase_at(plan.finish_from) == FINISH


def test_an_epoch_has_every_window_once_and_the_next_one_others():
    windows = Windows(np.arange(1000, dtype=np.uint16), "cpu", seed=3)
    first = windows.batch(0, 9, 100)
    starts = first[:, 0].sort().values
    assert torch.equal(starts.diff(), torch.full((8,), 100))
    assert torch.equal(first - first[:, :1], torch.arange(100).expand(9, -1))
    again = Windows(np.arange(1000, dtype=np.uint16), "cpu", seed=3)
    assert torch.equal(torch.cat((again.batch(0, 4, 100), again.batch(4, 5, 100))), first)
    assert not torch.equal(windows.batch(9, 9, 100), first)


def test_a_stream_without_two_windows_is_refused():
    assert Windows(np.zeros(200, np.uint16), "cpu").batch(0, 1, 100).shape == (1, 100)
    with pytest.raises(ValueError, match="no two windows"):
        Windows(np.zeros(199, np.uint16), "cpu").batch(0, 1, 100)


def test_rates_reach_every_group():
    both = optimisers(Network(SMALL))
    set_rate(both, 1e-3)
    assert [g["lr"] for o in both for g in o.param_groups] == [1e-3, 1e-3, pytest.approx(TABLE_RATE * 1e-3)]


def step(network, both, seed):
    ids = torch.randint(1, SMALL.vocab_size, (2, 34), generator=torch.Generator().manual_seed(seed))
    total(losses(network, ids, How(), 1, 0), Shares()).backward()
    for optimiser in both:
        optimiser.step()
        optimiser.zero_grad()


def test_a_loaded_state_takes_the_step_that_would_have_come(tmp_path):
    torch.manual_seed(0)
    network = Network(SMALL)
    both = optimisers(network)
    set_rate(both, 1e-3)
    step(network, both, 1)
    counters = states.Counters(1, 64, 2.5, {"32": 2})
    states.save(tmp_path / "state.safetensors", network, both, counters)
    step(network, both, 2)

    other = Network(SMALL)
    theirs = optimisers(other)
    assert states.load(tmp_path / "state.safetensors", other, theirs) == counters
    set_rate(theirs, 1e-3)
    step(other, theirs, 2)
    for name, value in network.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_parts_give_the_checkpoint_back_and_flips_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "PART_BYTES", 200_000)
    source = export.write_checkpoint(tmp_path / "source", SMALL, Network(SMALL).state_dict(), None)
    export.write_parts(source, tmp_path / "parts")
    parts = sorted((tmp_path / "parts").glob("part-*"))
    assert len(parts) > 2
    assert all(p.stat().st_size <= 200_000 for p in parts)
    export.join_parts(tmp_path / "parts", tmp_path / "back")
    for path in source.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()

    index = json.loads((tmp_path / "parts" / "index.json").read_text())
    (tmp_path / "parts" / "index.json").write_text(json.dumps({**index, "files": {"../escaped": "x"}}))
    with pytest.raises(ValueError, match="no file name"):
        export.join_parts(tmp_path / "parts", tmp_path / "third")
    (tmp_path / "parts" / "index.json").write_text(json.dumps({**index, "sha256": "0" * 64}))
    with pytest.raises(ValueError, match="another digest"):
        export.join_parts(tmp_path / "parts", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_flops_are_six_per_parameter_and_attention():
    trunk, draft = parameters_used(SMALL)
    head = SMALL.vocab_size * SMALL.hidden_size
    assert training_flops_per_token(SMALL, 0, 0.0) == 6 * (trunk + head)
    assert training_flops_per_token(SMALL, 0, 2.0) == 6 * (trunk + head) + 12 * (draft + head)
    assert training_flops_per_token(SMALL, 64, 0.0) > training_flops_per_token(SMALL, 0, 0.0)


def test_routing_figures_count_decode_windows_only():
    def window(keys: list[int], rows: int = 1) -> Touched:
        return Touched(np.array(keys), np.full(len(keys), rows), rows)

    prompt = window(list(range(10, 20)), rows=50)
    decode = [window([0, 1 + n % 9]) for n in range(40)]
    found = figures(Replay("small", 20, [prompt, *decode], decode_rows=4))
    assert (found["decode_windows"], found["keys"]) == (40, 20)
    assert found["hottest_tenth_share"] == pytest.approx((40 + 5) / 80)
    for share in ("10%", "20%", "40%"):
        assert set(found[share]) == {"lru", "adaptive"}
    assert found["40%"]["lru"] >= found["10%"]["lru"]
    assert found["40%"]["adaptive"] >= found["10%"]["adaptive"] > 0
