from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import QueueFull
from coordinator.queue import RequestQueue


def test_order_of_arrival_and_the_bound() -> None:
    queue: RequestQueue[str] = RequestQueue(2)
    queue.push("a", "A")
    queue.push("b", "B")
    with pytest.raises(QueueFull):
        queue.push("c", "C")
    assert (queue.head(), list(queue), len(queue)) == ("A", ["A", "B"], 2)


def test_a_request_that_left_frees_its_place_at_once() -> None:
    queue: RequestQueue[str] = RequestQueue(2)
    queue.push("a", "A")
    queue.push("b", "B")
    assert queue.remove("a")
    assert not queue.remove("a")
    queue.push("c", "C")
    assert list(queue) == ["B", "C"]
    assert [queue.position(name) for name in "abc"] == [None, 0, 1]


def test_what_a_lane_handed_back_stands_first_even_in_a_full_queue() -> None:
    queue: RequestQueue[str] = RequestQueue(1)
    queue.push("b", "B")
    queue.push_front("a", "A")
    assert list(queue) == ["A", "B"]
    with pytest.raises(QueueFull):
        queue.push("c", "C")


_steps = st.lists(st.tuples(st.sampled_from(["push", "front", "remove", "pop"]), st.integers(0, 6)), max_size=60)


@given(bound=st.integers(1, 4), steps=_steps)
def test_equals_a_plain_list(bound: int, steps: list[tuple[str, int]]) -> None:
    queue: RequestQueue[int] = RequestQueue(bound)
    model: list[int] = []
    for step, number in steps:
        if step == "push" and number not in model:
            if len(model) >= bound:
                with pytest.raises(QueueFull):
                    queue.push(str(number), number)
            else:
                queue.push(str(number), number)
                model.append(number)
        elif step == "front" and number not in model:
            queue.push_front(str(number), number)
            model.insert(0, number)
        elif step == "remove":
            assert queue.remove(str(number)) == (number in model)
            model = [n for n in model if n != number]
        elif step == "pop" and model:
            assert queue.head() == model[0]
            queue.remove(str(model.pop(0)))
        assert list(queue) == model
        assert [queue.position(str(n)) for n in model] == list(range(len(model)))
