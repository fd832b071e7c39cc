"""Placement in seconds: the quickest lane, with what lanes remember, are busy with, and how fast they were measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.policy.affinity import Seat
from coordinator.policy.placement import Choice, LaneSight, Wanted, choose
from coordinator.policy.placer import Job, Placed, Placer, Proposal, first_to_begin
from coordinator.policy.prefixes import Prefix, PrefixIndex
from coordinator.policy.rates import Counted, LaneRates, OutputLengths, Speed


def lane(name: str, **more: object) -> LaneSight:
    plain = LaneSight(name, True, 0.0, 1 / 1000.0, 1 / 20.0, 0, 0)
    return plain._replace(**more)  # type: ignore[arg-type]


def goes(
    lanes: Sequence[LaneSight], prompt: int, output: float, waited_s: float = 0.0, *, others: bool = False, **more: Any
) -> str | float:
    """The lane, or how long it waits."""
    choice = choose(lanes, Wanted(prompt, output, more.pop("remembered", {}), **more))
    left_s = choice.wait_s(waited_s, others=others)
    if left_s:
        return left_s
    assert choice.lane is not None
    return choice.lane.name


def test_the_lane_that_remembers_the_prompt() -> None:
    assert goes([lane("a"), lane("b")], 1000, 20, remembered={"b": 900.0}) == "b"


def test_a_faster_lane_even_if_it_has_to_read_more() -> None:
    assert goes([lane("slow"), lane("fast", write_s=1 / 40.0)], 1000, 100, remembered={"slow": 900.0}) == "fast"


def test_equal_lanes_take_turns_and_the_sessions_own_is_first() -> None:
    lanes = [lane("a", last_turn=3), lane("b", last_turn=1), lane("c", last_turn=2)]
    assert goes(lanes, 100, 10) == "b"
    assert goes(lanes, 100, 10, home="a") == "a"
    assert goes([lane("a", load=1), lane("b", last_turn=9)], 100, 10) == "b"


def test_a_busy_lane_is_waited_for_only_while_that_is_quicker() -> None:
    busy, known = lane("busy", free=False, wait_s=2.0), {"busy": 10_000.0}
    assert goes([busy, lane("free")], 10_001, 20, remembered=known) == pytest.approx(8.0)
    assert goes([busy, lane("free")], 10_001, 20, 7.9, remembered=known) == pytest.approx(0.1)
    assert goes([busy, lane("free")], 10_001, 20, 8.0, remembered=known) == "free"
    assert goes([busy._replace(wait_s=10.1), lane("free")], 10_001, 20, remembered=known) == "free"
    assert goes([busy], 10_001, 20) == float("inf")
    assert goes([], 1, 1) == float("inf")


def test_while_others_wait_a_request_lets_them_pass_for_a_bounded_time() -> None:
    lanes, known = [lane("home", free=False, wait_s=100.0), lane("other")], {"home": 10_000.0}
    assert goes(lanes, 10_001, 20, remembered=known) == "other"
    bound_s = limits.PASSING * 10.0
    assert goes(lanes, 10_001, 20, others=True, remembered=known) == pytest.approx(bound_s)
    assert goes(lanes, 10_001, 20, bound_s, others=True, remembered=known) == "other"
    assert goes(lanes, 10_001, 20, others=True, remembered=known | {"other": 10_000.0}) == "other"


def test_a_cold_lane_ramps_in() -> None:
    placer, cold, warm = Placer(), Seat("cold", b"1"), Seat("warm", b"1")
    placer.counted(warm, Counted(limits.WARM_TOKENS, 2.0, 40, 2.0))
    placer.counted(cold, Counted(limits.WARM_TOKENS // 2, 1.0, 0, 0.0))
    by_name = {sight.name: sight for sight in placer.look({cold: [], warm: []}, 1).lanes}
    assert by_name["cold"].read_s == pytest.approx((1 + limits.COLD_COST / 2) * by_name["warm"].read_s)
    assert by_name["cold"].write_s == pytest.approx((1 + limits.COLD_COST / 2) * by_name["warm"].write_s)
    for busy_s, best in (({cold: [], warm: []}, warm), ({cold: [], warm: [9.0]}, cold)):
        assert placer.propose(Job(None, 100, 20), placer.look(busy_s, 1)).placed.seat == best


SIGHTS = st.builds(
    LaneSight, name=st.text("abcdefgh", min_size=1, max_size=3), free=st.booleans(), wait_s=st.floats(0, 60),
    read_s=st.floats(1e-5, 1), write_s=st.floats(1e-4, 10), load=st.integers(0, 3), last_turn=st.integers(0, 99),
)  # fmt: skip
PLACED = Placed(Seat("a", b"1"), 1.0, 100.0, 0.5)
LANES = st.lists(SIGHTS, max_size=8, unique_by=lambda s: s.name)


@given(LANES, st.integers(1, 5000), st.floats(0, 500), st.data(), st.randoms())
def test_order_changes_nothing_and_a_free_lane_is_taken_in_the_end(
    sights: list[LaneSight], prompt: int, output: float, data: st.DataObject, rng: random.Random
) -> None:
    names = [sight.name for sight in sights]
    remembered = data.draw(st.dictionaries(st.sampled_from(names), st.floats(0, 5000))) if names else {}
    more = {"remembered": remembered, "home": rng.choice(names) if names else None}
    chosen = goes(sights, prompt, output, **more)
    shuffled = sights.copy()
    rng.shuffle(shuffled)
    assert goes(shuffled, prompt, output, **more) == chosen
    free = {sight.name for sight in sights if sight.free}
    if isinstance(chosen, str):
        assert chosen in free
    elif free:
        assert isinstance(goes(sights, prompt, output, chosen, **more), str)
    else:
        assert chosen == float("inf")


@given(st.lists(st.tuples(st.booleans(), st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 5)), max_size=6))
def test_who_begins_is_the_first_that_a_free_lane_suits_then_the_first_that_need_not_wait(
    waiting: list[tuple[bool, float, float, float]],
) -> None:
    """Against the two rounds written out."""
    proposals = {
        number: Proposal(Choice(lane("a") if somewhere else None, alone_s, passing_s), PLACED if somewhere else None)
        for number, (somewhere, alone_s, passing_s, _) in enumerate(waiting)
    }
    found = first_to_begin(proposals, proposals.__getitem__, lambda number: waiting[number][3])
    lefts_s = []
    for others in (True, False) if len(waiting) > 1 else (False,):
        for number, proposal in proposals.items():
            left_s = proposal.choice.wait_s(waiting[number][3], others=others)
            if left_s == 0.0:
                assert found == (number, PLACED)
                return
            lefts_s.append(left_s)
    assert found == min(lefts_s, default=float("inf"))


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
    assert index.remembered(chain(1, 9), ["a", "b"]) == {"a": 64.0}
    index.add("b", [Prefix(bytes([1, 2]), 130), Prefix(bytes([1, 2]), 140)])  # taken back from the pool; and one more
    assert index.remembered(chain(1, 2), ["b", "c"]) == {"b": 140.0}
    index.remove("b", [Prefix(bytes([1, 2]), 140)])
    assert index.remembered(chain(1, 2), ["b"]) == {"b": 130.0}
    index.remove("a", [Prefix(bytes([1, 2, 3]), 200), Prefix(b"unknown", 1)])
    assert index.remembered(chain(1, 2, 3, 4), ["a"]) == {"a": 64.0}
    index.forget("a")
    index.forget("b")
    assert len(index) == 0


def test_what_is_parked_on_a_host_is_of_use_to_its_own_lanes_only() -> None:
    index = PrefixIndex()
    index.add("build-2/lane-0", [Prefix(bytes([1, 2]), 130, parked=True)])
    lanes = ["lane-0", "build-2/lane-0", "build-2/lane-1", "build-3/lane-0"]
    there = limits.PARKED_WORTH * 130
    assert index.remembered(chain(1, 2, 3), lanes) == {"build-2/lane-0": there, "build-2/lane-1": there}
    index.add("lane-0", [Prefix(bytes([1]), 64, parked=True)])
    index.add("build-3/lane-0", [Prefix(bytes([1]), 64)])
    here = limits.PARKED_WORTH * 64
    assert index.remembered(chain(1, 2, 3), lanes) == {
        "lane-0": here, "build-2/lane-0": there, "build-2/lane-1": there, "build-3/lane-0": 64.0,
    }  # fmt: skip


def test_a_conversation_parked_on_a_host_goes_back_there_unless_waiting_costs_more_than_reading_again() -> None:
    placer = Placer()
    seats = [Seat(name, b"1") for name in ("lane-0", "b/lane-0", "b/lane-1")]
    placer.tell(seats[1], [Prefix(bytes([1, 2]), 10_000, parked=True)], [], anew=True)
    job = Job(None, 10_100, 8, chain(1, 2, 3))

    def goes_to(busy_s: dict[str, float]) -> str | None:
        look = placer.look({seat: [busy_s[seat.lane]] if seat.lane in busy_s else [] for seat in seats}, 1)
        proposal = placer.propose(job, look)
        begins = not proposal.choice.wait_s(0.0, others=False)
        return proposal.placed.seat.lane if proposal.placed and begins else None

    assert goes_to({}) in ("b/lane-0", "b/lane-1")
    assert goes_to({"b/lane-0": 100.0}) == "b/lane-1"  # any lane of that host
    assert goes_to({"b/lane-0": 100.0, "b/lane-1": 100.0}) == "lane-0"  # read again on the other host
    assert goes_to({"b/lane-0": 0.01, "b/lane-1": 100.0}) is None  # it waits for the host that has it


def test_prefixes_of_a_lane_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KNOWN_PREFIXES", 3)
    index = PrefixIndex()
    index.add("a", [Prefix(bytes([k]), 64) for k in range(4)])
    assert len(index) == 3
    assert index.remembered([bytes([0])], ["a"]) == {}
    assert index.remembered([bytes([1])], ["a"]) == {"a": 64.0}


def test_a_new_process_remembers_nothing_and_has_no_sessions() -> None:
    placer, first, second = Placer(), Seat("a", b"1"), Seat("a", b"2")
    other = Seat("b", b"1")
    warm = Counted(10_000, 10.0, 100, 5.0)
    placer.counted(first, warm)
    placer.counted(other, warm)
    placer.tell(first, [Prefix(bytes([1]), 64)], [], anew=True)
    job = Job("s", 100, 10, chain(1))
    placed = placer.propose(job, placer.look({first: [], other: []}, 1)).placed
    assert placed is not None
    assert (placed.seat, placed.tokens) == (first, 36 + 10)
    assert placer.expected(job, placer.look({first: []}, 1)) == {first: placed}
    assert placed.read_s == pytest.approx(36 / 1000.0)
    placer.placed(job, first)
    placer.counted(second, warm)
    moved = placer.propose(job, placer.look({second: [], other: []}, 1)).placed
    assert moved is not None
    assert (moved.seat, moved.tokens) == (other, 110)  # whose turn it is
