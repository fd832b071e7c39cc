"""Placement in seconds: the quickest lane, with what lanes remember, are busy with, and how fast they were measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import limits
from coordinator.policy.affinity import Seat
from coordinator.policy.placement import Go, LaneSight, Wait, choose, work_s
from coordinator.policy.placer import Job, Placed, Placer
from coordinator.policy.prefixes import Prefix, PrefixIndex
from coordinator.policy.rates import Counted, LaneRates, OutputLengths, Speed

SPEED = Speed(1000.0, 20.0)


def lane(name: str, **more: object) -> LaneSight:
    plain = LaneSight(name, True, 0.0, SPEED, 0.0, 1.0, False, 0, 0)
    return replace(plain, **more)  # type: ignore[arg-type]


def test_the_lane_that_remembers_the_prompt() -> None:
    assert choose([lane("a"), lane("b", remembered_tokens=900.0)], 1000, 20, 0) == Go("b")


def test_a_faster_lane_even_if_it_has_to_read_more() -> None:
    fast = lane("fast", speed=Speed(1000.0, 40.0))
    assert choose([lane("slow", remembered_tokens=900.0), fast], 1000, 100, 0) == Go("fast")


def test_equal_lanes_take_turns_and_the_sessions_own_is_first() -> None:
    lanes = [lane("a", last_turn=3), lane("b", last_turn=1), lane("c", last_turn=2)]
    assert choose(lanes, 100, 10, 0) == Go("b")
    assert choose([replace(lanes[0], is_home=True), *lanes[1:]], 100, 10, 0) == Go("a")
    assert choose([lane("a", load=1), lane("b", last_turn=9)], 100, 10, 0) == Go("b")


def test_a_busy_lane_is_waited_for_only_while_that_is_quicker() -> None:
    busy = lane("busy", free=False, wait_s=2.0, remembered_tokens=10_000.0)
    assert choose([busy, lane("free")], 10_001, 20, 0) == Wait(pytest.approx(8.0))
    assert choose([busy, lane("free")], 10_001, 20, 7.9) == Wait(pytest.approx(0.1))
    assert choose([busy, lane("free")], 10_001, 20, 8.0) == Go("free")
    assert choose([replace(busy, wait_s=10.1), lane("free")], 10_001, 20, 0) == Go("free")
    assert choose([busy], 10_001, 20, 0) == Wait(float("inf"))
    assert choose([], 1, 1, 0) == Wait(float("inf"))


def test_while_others_wait_a_request_lets_them_pass_for_a_bounded_time() -> None:
    home = lane("home", free=False, wait_s=100.0, remembered_tokens=10_000.0)
    other = lane("other")
    assert choose([home, other], 10_001, 20, 0) == Go("other")
    bound_s = limits.PASSING * 10.0
    assert choose([home, other], 10_001, 20, 0, others=True) == Wait(pytest.approx(bound_s))
    assert choose([home, other], 10_001, 20, bound_s, others=True) == Go("other")
    assert choose([home, replace(other, remembered_tokens=10_000.0)], 10_001, 20, 0, others=True) == Go("other")


def test_a_cold_lane_ramps_in() -> None:
    assert choose([lane("cold", warmth=0.0), lane("warm", last_turn=5)], 100, 20, 0) == Go("warm")
    assert choose([lane("cold", warmth=0.0), lane("warm", free=False, wait_s=9.0)], 100, 20, 0) == Go("cold")
    assert work_s(lane("x", warmth=0.0), 100, 20) == pytest.approx((1 + limits.COLD_COST) * 1.1)


SIGHTS = st.builds(
    LaneSight, name=st.text("abcdefgh", min_size=1, max_size=3), free=st.booleans(), wait_s=st.floats(0, 60),
    speed=st.builds(Speed, st.floats(1, 1e5), st.floats(0.1, 1e4)), remembered_tokens=st.floats(0, 5000),
    warmth=st.floats(0, 1), is_home=st.booleans(), load=st.integers(0, 3), last_turn=st.integers(0, 99),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(SIGHTS, max_size=8, unique_by=lambda s: s.name), st.integers(1, 5000), st.floats(0, 500), st.randoms())
def test_order_changes_nothing_and_a_free_lane_is_taken_in_the_end(sights, prompt, output, rng: random.Random) -> None:
    chosen = choose(sights, prompt, output, 0.0)
    shuffled = sights.copy()
    rng.shuffle(shuffled)
    assert choose(shuffled, prompt, output, 0.0) == chosen
    free = {sight.name for sight in sights if sight.free}
    if isinstance(chosen, Go):
        assert chosen.lane in free
    elif free:
        assert isinstance(choose(sights, prompt, output, chosen.seconds), Go)
    else:
        assert chosen.seconds == float("inf")


def test_a_poor_first_measurement_is_outweighed_and_forgotten() -> None:
    """Two short prompts with everything cold, then nothing: the lane must get work again."""
    rates = LaneRates()
    rates.look("cold", Counted(20, 0.2, 8, 0.4))  # 100 and 20 tokens a second
    rates.look("warm", Counted(20_000, 10.0, 1000, 10.0))  # 2,000 and 100
    assert rates.speed("cold").prefill > 1500.0
    assert 60.0 < rates.speed("cold").decode < 100.0
    assert rates.speed("warm").decode > 95.0  # what was measured for long stands
    for turn in range(2, 8):
        rates.look("warm", Counted(20_000 * turn, 10.0 * turn, 1000 * turn, 10.0 * turn))
    assert rates.speed("cold").decode > 95.0


def test_a_lane_that_is_slower_is_known_to_be() -> None:
    rates = LaneRates()
    for turn in range(1, 20):
        rates.look("slow", Counted(1000 * turn, 10.0 * turn, 100 * turn, 10.0 * turn))
        rates.look("fast", Counted(4000 * turn, 10.0 * turn, 400 * turn, 10.0 * turn))
    assert rates.speed("slow").prefill < 180.0
    assert rates.speed("fast").prefill > 350.0


def test_rates_are_measured_from_counters_and_survive_a_death() -> None:
    rates = LaneRates()
    assert rates.speed("a") == Speed(limits.DEFAULT_PREFILL_TOKENS_PER_S, limits.DEFAULT_DECODE_TOKENS_PER_S)
    assert not rates.measured
    rates.look("a", Counted(1000, 0.5, 40, 4.0))
    assert rates.measured
    assert rates.speed("a") == Speed(2000.0, 10.0)
    assert rates.speed("b") == Speed(2000.0, 10.0)  # of the others
    rates.look("a", Counted(1000, 0.5, 40, 4.0))  # nothing new
    rates.look("a", Counted(10, 0.001, 0, 0.0))  # another process; too short to believe
    assert rates.speed("a") == Speed(2000.0, 10.0)
    for step in range(1, 40):
        rates.look("a", Counted(10 + 1000 * step, 0.001 + step, 100 * step, 1.0 * step))
    assert rates.speed("a").prefill == pytest.approx(1000.0, rel=0.01)
    assert rates.speed("a").decode == pytest.approx(100.0, rel=0.01)
    rates.forget("a")
    assert not rates.measured


def test_expected_lengths_follow_what_is_seen_and_never_pass_what_is_allowed() -> None:
    lengths = OutputLengths()
    assert lengths.expected(10) == 10
    for _ in range(100):
        lengths.ended(50)
    assert lengths.expected(4096) == pytest.approx(50, rel=0.01)


def chain(*blocks: int) -> list[bytes]:
    """Chains of a prompt whose blocks are told by numbers."""
    return [bytes(blocks[: k + 1]) for k in range(len(blocks))]


def test_prefixes_by_their_longest_known_beginning() -> None:
    index = PrefixIndex()
    index.add("a", [Prefix(bytes([1]), 64), Prefix(bytes([1, 2, 3]), 200)])
    index.add("b", [Prefix(bytes([1, 2]), 130, parked=True)])
    found = index.remembered(chain(1, 2, 3, 4), ["a", "b", "c"])
    assert found == {"a": 200.0, "b": limits.PARKED_WORTH * 130, "c": limits.PARKED_WORTH * 130}
    assert index.remembered(chain(1, 9), ["a", "b"]) == {"a": 64.0, "b": 0.0}
    index.add("b", [Prefix(bytes([1, 2]), 130), Prefix(bytes([1, 2]), 140)])  # taken back from the pool; and one more
    assert index.remembered(chain(1, 2), ["b", "c"]) == {"b": 140.0, "c": 0.0}
    index.remove("b", [Prefix(bytes([1, 2]), 140)])
    assert index.remembered(chain(1, 2), ["b"]) == {"b": 130.0}
    index.remove("a", [Prefix(bytes([1, 2, 3]), 200), Prefix(b"unknown", 1)])
    assert index.remembered(chain(1, 2, 3, 4), ["a"]) == {"a": 64.0}
    index.forget("a")
    index.forget("b")
    assert len(index) == 0


def test_prefixes_of_a_lane_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KNOWN_PREFIXES", 3)
    index = PrefixIndex()
    index.add("a", [Prefix(bytes([k]), 64) for k in range(4)])
    assert len(index) == 3
    assert index.remembered([bytes([0])], ["a"]) == {"a": 0.0}
    assert index.remembered([bytes([1])], ["a"]) == {"a": 64.0}


def test_a_new_process_remembers_nothing_and_has_no_sessions() -> None:
    placer, first, second = Placer(), Seat("a", b"1"), Seat("a", b"2")
    other = Seat("b", b"1")
    warm = Counted(10_000, 10.0, 100, 5.0)
    placer.look(first, warm)
    placer.look(other, warm)
    placer.tell(first, [Prefix(bytes([1]), 64)], [], anew=True)
    job = Job("s", 100, 10, chain(1))
    placed = placer.place(job, {first: [], other: []}, 1)
    assert isinstance(placed, Placed)
    assert (placed.seat, placed.tokens) == (first, 36 + 10)
    placer.placed(job, first)
    placer.look(second, warm)
    moved = placer.place(job, {second: [], other: []}, 1)
    assert isinstance(moved, Placed)
    assert (moved.seat, moved.tokens) == (other, 110)  # whose turn it is
