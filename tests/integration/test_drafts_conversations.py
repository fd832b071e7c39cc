"""Conversations answered with drafts are taken up like any: the same ids, at their end and at a checkpoint."""

import contextlib

import pytest

from lanes.drafts.drafter import Drafter
from lanes.request import Request, Sampling
from lanes.runner import ModelRunner
from lanes.state.conversations import Conversations
from lanes.state.pool import StatePool
from lanes.window import Window
from tests.fakes.drafts import convinced, oracle, scripted
from tests.integration.test_drafts_answers import PROMPT, Rig, rig  # noqa: F401  a fixture

TURNS = ((17, 4, 300), (88, 5, 9, 300, 11, 7), (401,))


@pytest.fixture
def remembering(rig):  # noqa: F811
    """The same model with room for several conversations."""
    model = rig.runner._model
    pool = StatePool(model.state_shape, 6 * model.state_shape.bytes(256) + (2 << 20), paged=True)
    runner = ModelRunner(model, pool, rig.store, Conversations(pool, rig.counters))
    yield Rig(runner, rig.store, rig.counters)
    for slot in list(pool):
        with contextlib.suppress(KeyError):
            runner._conversations._drop(runner._conversations[slot])


async def talk(rig, drafter_of, hints=()):  # noqa: F811
    """Three turns on one conversation; (all ids, cached tokens of each turn)."""
    text, cached = list(PROMPT), []
    for turn in TURNS:
        request = Request("r", tuple(text), 15, Sampling(temperature=0.7, seed=5), checkpoint_positions=tuple(hints))
        tokens, end = await rig.answer(drafter_of(text), request)
        cached.append(end.cached_tokens)
        text += [*(t.id for t in tokens), *turn]
    return text, cached


@pytest.mark.parametrize("hints", [(), (10, 20)])
async def test_turns_go_on_with_drafts_as_without(rig, remembering, hints):  # noqa: F811
    plain, cached = await talk(remembering, lambda text: None, hints)
    assert cached[0] == 0
    assert cached[1] == len(PROMPT) + 14
    remembering.runner._conversations.forget()
    for name, drafter_of in {
        "layer": lambda text: Drafter(3, remembering.runner.guess, beliefs=convinced()),
        "oracle": lambda text: scripted(oracle((), plain, 3, lambda place: place % 4 == 0)),
        "adversary": lambda text: scripted(oracle((), plain, 3, lambda place: True)),
    }.items():
        text, again = await talk(remembering, drafter_of, hints)
        assert text == plain, name
        assert again == cached, name
        # back to an earlier place of the same conversation, with drafts of its own
        branch = Request("b", tuple(plain[: len(PROMPT) + 15 + 1]), 8)
        expected = [t.id for t in (await rig.answer(None, branch))[0]]
        assert [t.id for t in (await remembering.answer(drafter_of(text), branch))[0]] == expected, name
        remembering.runner._conversations.forget()


async def test_what_a_tenants_windows_left_in_buffers_is_gone_before_anothers(rig, remembering):  # noqa: F811
    drafter = Drafter(3, remembering.runner.guess, beliefs=convinced())
    kernel, drafts = rig.store._kernel, remembering.runner._model.drafts

    def request(tenant):
        return Request("r", tuple(PROMPT), 15, Sampling(temperature=0.7, seed=5), tenant_salt=tenant)

    first, _ = await remembering.answer(drafter, request(b"a"))
    again, _ = await remembering.answer(drafter, request(b"a"))
    scratch, chained = rig.store._scratch, drafts.chained
    assert scratch.any()
    assert chained.any()
    runner = remembering.runner
    slot = runner.resume([1, 2, 3], 8, b"b").slot
    assert not scratch.any()
    assert not chained.any()
    assert kernel.erase() == 0, "erased already"
    assert runner.forward(Window.of_sequence([1, 2], 0, slot, trial=True), lambda: False) is not None
    trial = runner._states[slot].trial
    runner.end(slot)  # cancelled before a commit
    left = [x for inputs in trial.recurrent.values() for x in (*inputs.steps, inputs.columns)]
    assert not any(x.any() for x in (*left, *trial.ngram.values(), trial.streams, trial._scratch))
    other, _ = await remembering.answer(drafter, request(b"b"))
    assert kernel.erase() > 0
    assert [t.id for t in first] == [t.id for t in again] == [t.id for t in other]


async def test_two_tenants_by_turns_leave_each_other_nothing(rig, remembering, monkeypatch):  # noqa: F811
    runner, erased = remembering.runner, []
    slots = [runner.resume([1, 2, 3], 8, tenant).slot for tenant in (b"a", b"b")]
    monkeypatch.setattr(rig.store, "erase", lambda: erased.append(True))
    counts = []
    for who, start in [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]:
        assert runner.forward(Window.of_sequence([7], start, slots[who]), lambda: False) is not None
        counts.append(len(erased))
    assert counts == [1, 1, 2, 3, 3, 4]
    for slot in slots:
        runner.end(slot)
