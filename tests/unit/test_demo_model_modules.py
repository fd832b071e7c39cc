"""The training modules of the demo model against their plain twins."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_model import plan_tensors
from deploy.demo_model.losses import Shares, losses, total
from deploy.demo_model.model.attention import Reading
from deploy.demo_model.model.delta_rule import delta_rule, naive, states_before, unit_inverse
from deploy.demo_model.model.indexer import selected, selection_loss
from deploy.demo_model.model.moe import grouped, looped
from deploy.demo_model.model.network import How, Network
from deploy.demo_model.optimiser import optimisers, orthogonalised
from deploy.demo_model.sizes import DEMO, SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


def rule_inputs(tokens: int, seed: int = 0, *, same_keys: bool = False) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    q, k, v = normal(2, 3, tokens, 8), normal(2, 3, tokens, 8), normal(2, 3, tokens, 4)
    if same_keys:
        k = k[:, :, :1].expand_as(k)
    k, q = (torch.nn.functional.normalize(x, dim=-1) for x in (k, q))
    g = -normal(2, 3, tokens).exp() * (0.0 if same_keys else 1.0)
    beta = normal(2, 3, tokens).sigmoid() if not same_keys else torch.ones(2, 3, tokens)
    return [q, k, v, g, beta]


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (17, 16), (50, 8), (80, 16), (5, 1)])
@pytest.mark.parametrize("same_keys", [False, True])
def test_the_chunked_rule_equals_token_by_token_with_gradients(tokens, chunk, same_keys):
    ours = [x.clone().requires_grad_() for x in rule_inputs(tokens, same_keys=same_keys)]
    theirs = [x.double().requires_grad_() for x in rule_inputs(tokens, same_keys=same_keys)]
    out, truth = delta_rule(*ours, chunk=chunk), naive(*theirs)
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (truth * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-3, atol=1e-4)


def test_the_inverse_holds_where_powers_would_overflow():
    lower = torch.ones(2, 64, 64).tril(-1)  # powers of it reach 1e17
    torch.testing.assert_close(unit_inverse(lower), torch.linalg.inv(lower.double() + torch.eye(64)).float())


@settings(max_examples=20)
@given(maps=st.integers(1, 13))
def test_the_scan_is_the_loop(maps):
    across, added = torch.randn(1, 2, maps, 3, 3) * 0.5, torch.randn(1, 2, maps, 3, 2)
    state, expected = torch.zeros(1, 2, 3, 2), []
    for m in range(maps):
        expected.append(state)
        state = across[:, :, m] @ state + added[:, :, m]
    torch.testing.assert_close(states_before(across, added), torch.stack(expected, 2))


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 40), experts=st.integers(2, 9))
def test_grouped_experts_are_looped_experts(seed, rows, experts):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=random)
    ids = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2, generator=random)
    matrices = [torch.randn(experts, 32, 16, generator=random) / 4, torch.randn(experts, 16, 16, generator=random) / 4]
    results = []
    for way in (grouped, looped):
        leaves = [t.clone().requires_grad_() for t in (x, weights, *matrices)]
        out = way(leaves[0], ids, leaves[1], leaves[2], leaves[3])
        (out * torch.arange(16)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_selection_takes_the_best_blocks_the_lowest_among_equals_and_the_open_block():
    score = torch.tensor([[[1.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 9.0], [9.0, 9.0, 9.0, 9.0]]])
    positions = torch.tensor([16, 13, 1])
    mask = selected(score, positions, budget=8, block=4, tokens=18)[0]
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16]
    assert mask[1].nonzero().flatten().tolist() == [*range(8), 12, 13]  # the fourth block is not complete yet
    assert mask[2].nonzero().flatten().tolist() == [0, 1]


def test_the_selection_loss_is_zero_at_the_attention_mass_and_counts_complete_blocks_only():
    positions, mass = (
        torch.tensor([9]),
        torch.tensor([[[0.1, 0.1, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05, 0.1, 0.1, 0.0, 0.0]]]),
    )
    right = torch.tensor([[[0.6, 0.2, 77.0]]]).log()
    assert float(selection_loss(right, mass, positions, 4)) == pytest.approx(0, abs=1e-6)
    assert float(selection_loss(torch.zeros(1, 1, 3), mass, positions, 4)) > 0.1


def test_every_tensor_of_a_checkpoint_has_its_name_and_shape():
    for sizes in (SMALL, DEMO):
        expected = {t.name: t.shape for t in plan_tensors(sizes, 0, "fused", "model.", True)}
        with torch.device("meta" if sizes is DEMO else "cpu"), torch.no_grad():
            found = {name: tuple(value.shape) for name, value in Network(sizes).state_dict().items()}
        assert found == expected


def test_the_demo_model_keeps_within_its_bounds():
    with torch.device("meta"):
        network = Network(DEMO)
    assert sum(p.numel() for p in network.parameters()) < 40e6
    assert network.model.layers[1].ple.ple_embedding.ngram_embedding.weight.shape[0] >= 100_000
    assert DEMO.num_experts >= 64
    assert DEMO.max_position_embeddings >= 32768


def batch(steps: int) -> torch.Tensor:
    return torch.randint(1, SMALL.vocab_size, (3, 72 + 1 + steps), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network(SMALL)


def test_the_indexer_learns_from_its_loss_alone(network):
    taught = torch.tensor([40, 60, 71])
    parts = losses(network, batch(3), How(Reading(None, taught)), 3, 1)
    assert set(parts) == {"main", "draft1", "draft2", "draft3", "balance", "selection"}
    network.zero_grad()
    (parts["main"] + parts["draft1"] + parts["draft2"] + parts["balance"]).backward(retain_graph=True)
    assert all(p.grad is None for name, p in network.named_parameters() if "indexer" in name)
    network.zero_grad()
    parts["selection"].backward()
    moved = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved
    assert all("indexer" in name for name in moved)


def test_a_step_moves_every_parameter_and_lowers_the_loss():
    torch.manual_seed(0)
    network, found = Network(SMALL), []
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    both = optimisers(network)
    for group in (g for o in both for g in o.param_groups):
        group["lr"] = 2e-3
    for _ in range(3):
        loss = total(losses(network, batch(1), How(Reading(None, torch.tensor([50, 70]))), 1, 0), Shares())
        found.append(float(loss.detach()))
        loss.backward()
        for optimiser in both:
            optimiser.step()
            optimiser.zero_grad()
    assert found[-1] < found[0]
    still = {n for n, p in network.named_parameters() if torch.equal(p, before[n])}
    assert still == set()


def test_a_later_draft_step_reads_what_drafting_would_have_cached(network):
    """Step two of one row, computed alone over the cached first-step rows and itself, is the row of the batch."""
    ids = batch(3)[:1, :24]
    with torch.no_grad():
        x = network(ids[:, :20]).x
        whole = network.draft(x, ids[:, :22], 2)
        part = network.draft(x[:, :9], ids[:, :11], 2)  # fewer rows: the same past for each
    torch.testing.assert_close(whole[1].x[:, :9], part[1].x, rtol=1e-4, atol=1e-5)


def test_attention_over_a_selection_as_large_as_the_past_is_dense(network):
    ids = batch(0)[:, :72]
    sizes = dataclasses.replace(SMALL, indexer_budget=72)
    with torch.no_grad():
        dense = network(ids).x
        assert torch.equal(network(ids, How(Reading(budget=sizes.indexer_budget))).x, dense)
        wide = network(ids, How(Reading(budget=68))).x  # selects, but leaves nothing out
        torch.testing.assert_close(wide[:, :70], dense[:, :70], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(network(ids, How(Reading(budget=8))).x, dense, atol=1e-4)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 8, 20), (2, 20, 8)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)).float())
        assert values.min() > 0.5
        assert values.max() < 1.4
    assert torch.equal(orthogonalised(torch.zeros(1, 4, 4)).float(), torch.zeros(1, 4, 4))
