"""Records reach the ring ahead of the steps that read them, on a device whose streams may be late at any time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts.feed import Feed
from tests.fakes.two_streams import TwoStreams

EXPERTS, MOST_LAYERS = 12, 5
some = st.sets(st.integers(0, EXPERTS - 1))
layers_of = st.lists(st.tuples(some, some), min_size=1, max_size=MOST_LAYERS)  # (resident, chosen) of each layer


def table(layers):
    resident = np.zeros((len(layers), EXPERTS), np.bool_)
    for layer, (here, _) in enumerate(layers):
        resident[layer, sorted(here)] = True
    return resident


def run(feed, device, layer, chosen, resident, early=1):
    """A layer as PromptExperts runs it, `early` of its steps before its choice is known; checks what its steps are."""

    def give(steps):
        for step in steps:
            assert all(step.first <= expert < step.end for expert, _ in step.copies)
            feed.arrive(step)
            device.give(device.reads(layer, step.copies))
            feed.over(step)

    begun = feed.begun(layer)
    give(begun[:early])
    rest = feed.rest(sorted(chosen))
    steps = begun + rest
    assert [step.first for step in steps] == [0, *(step.end for step in steps[:-1])]
    assert steps[-1].end == EXPERTS, "each expert in one step, ascending"
    copied = [expert for step in steps for expert, _ in step.copies]
    assert copied == sorted(copied)
    assert set(chosen) - set(copied) <= set(np.flatnonzero(resident[layer]).tolist())
    give(begun[early:])
    give(rest)
    return copied


@settings(deadline=None)
@given(layers_of, st.integers(1, 9), st.integers(0, MOST_LAYERS), st.data())
def test_every_step_finds_its_records_whoever_is_late(layers, slots, ahead, data):
    device, resident = TwoStreams(), table(layers)
    feed = Feed(slots, resident, device, min(ahead, len(layers)))
    for layer, (here, chosen) in enumerate(layers):
        copied = run(feed, device, layer, chosen, resident, data.draw(st.integers(0, 4)))
        assert set(copied).isdisjoint(here)
        if layer >= ahead:
            assert copied == sorted(chosen - here), "nothing more than what was chosen"
        device.give()  # attention
    device.finish(lambda: data.draw(st.booleans()))
    assert len(device.asked) == len(set(device.asked)), "nothing comes twice"


@settings(deadline=None)
@given(layers_of, st.lists(st.integers(0, MOST_LAYERS - 1), max_size=6), st.integers(1, 9), st.booleans(), st.data())
def test_layers_in_any_order(layers, order, slots, is_ahead, data):
    """Not what a model does; what was copied for layers that did not come is in nobody's way."""
    device, resident = TwoStreams(), table(layers)
    feed = Feed(slots, resident, device, len(layers) if is_ahead else 0)
    for layer in (layer for layer in order if layer < len(layers)):
        run(feed, device, layer, layers[layer][1], resident)
    device.finish(lambda: data.draw(st.booleans()))


@settings(deadline=None)
@given(layers_of, st.integers(1, 9), st.integers(0, 40), st.data())
def test_left_at_any_point_slots_serve_their_next_owner(layers, slots, until, data):
    """A cancel or an error: nothing more is said to the feed; copies under way end before the next owner's begin."""
    device, resident = TwoStreams(), table(layers)
    feed, said = Feed(slots, resident, device, len(layers)), 0
    for layer, (_, chosen) in enumerate(layers):
        for step in feed.steps(layer, sorted(chosen)) if said < until else ():
            for say in (feed.arrive, lambda step, n=layer: device.give(device.reads(n, step.copies)), feed.over):
                if said < until:
                    say(step)
                said += 1
        said += 1
    device.copy(99, [(slot, slot) for slot in range(slots)], device.mark())
    device.finish(lambda: data.draw(st.booleans()))
    assert device.held == {slot: (99, slot) for slot in range(slots)}


def everything(layers):
    return [(set(), set(range(EXPERTS)))] * layers


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 9])
def test_the_next_layer_begins_under_this_ones_last_step(slots):
    layers, device = everything(3), TwoStreams()
    feed = Feed(slots, table(layers), device, 3)
    assert device.asked == [(0, expert) for expert in range(slots - slots % max(1, slots // 2))], "all of the ring"
    steps = feed.steps(0, range(EXPERTS))
    for step in steps[:-1]:
        feed.arrive(step)
        feed.over(step)
    before = len(device.asked)
    assert ((1, 0) in device.asked) == (slots > 1), "one half is free while the other is read"
    feed.arrive(steps[-1])
    feed.over(steps[-1])
    assert (1, 0) in device.asked, "before routing of layer 1 is known, under its attention"
    assert len(device.asked) > before
    assert device.asked[:EXPERTS] == [(0, expert) for expert in range(EXPERTS)], "in fixed order"


def test_once_routing_is_known_only_what_was_chosen_follows():
    layers, device = everything(1), TwoStreams()
    feed = Feed(4, table(layers), device, 1)
    assert run(feed, device, 0, {1, 9, 11}, table(layers)) == [0, 1, 2, 3, 9, 11]
    device.finish(lambda: True)


def test_layers_that_are_all_there_are_run_past():
    here = set(range(EXPERTS))
    layers, device = [(here, here), (here, here), (set(), here)], TwoStreams()
    feed = Feed(2, table(layers), device, 3)
    assert device.asked == [(2, 0), (2, 1)]
    for layer in range(3):
        run(feed, device, layer, here, table(layers))
    device.finish(lambda: False)


def test_steps_out_of_turn_are_a_mistake():
    feed = Feed(4, table(everything(1)), TwoStreams(), 1)
    first, second, *_ = feed.steps(0, range(EXPERTS))
    with pytest.raises(AssertionError, match="in turn"):
        feed.over(second)
    feed.over(first)
    with pytest.raises(AssertionError, match="not over"):
        feed.steps(1, [])


def test_a_layer_has_its_rest_before_the_next_one_begins():
    feed = Feed(4, table(everything(2)), TwoStreams(), 2)
    with pytest.raises(AssertionError, match="which layer"):
        feed.rest([])
    feed.begun(0)
    with pytest.raises(AssertionError, match="no rest"):
        feed.begun(1)
