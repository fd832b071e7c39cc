"""The fleet as a pure state machine: restarts, quarantine, silence, and what no history may ever lead to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.states import (
    Backoff,
    Fleet,
    FleetLimits,
    Kill,
    Observed,
    Phase,
    Progress,
    Remembered,
    Said,
    Start,
)

LIMITS = FleetLimits()
LANES = {"lane-0", "lane-1"}


def running(starts, pid=100):
    return Observed(running=True, starts=starts, pid=pid)


def exited(starts, code=1):
    return Observed(running=False, starts=starts, exit_code=code)


def fleet_of(now=0.0, **seen):
    fleet = Fleet()
    fleet.observe({name.replace("_", "-"): value for name, value in seen.items()}, LANES, now)
    return fleet


def run_until(fleet, begin, end, step=0.1):
    """All actions with their times."""
    times = [round(begin + k * step, 3) for k in range(round((end - begin) / step))]
    return [(now, action) for now in times for action in fleet.tick(now)]


def test_a_crash_is_followed_by_one_start_after_the_first_backoff():
    fleet = fleet_of(lane_0=running(1))
    fleet.observe({"lane-0": exited(1)}, LANES, 10.0)
    assert fleet.phase("lane-0") is Phase.DEAD
    assert run_until(fleet, 10.0, 20.0) == [(10.5, Start("lane-0"))]
    assert fleet.tick(10.4) == []


def test_a_start_that_fails_is_tried_again_after_the_longest_backoff():
    fleet = fleet_of(lane_0=running(1))
    fleet.observe({"lane-0": exited(1)}, LANES, 10.0)
    ((_, action),) = run_until(fleet, 10.0, 11.0)
    fleet.failed(action, 11.0)
    assert run_until(fleet, 11.0, 60.0)[0][0] >= 41.0 - 0.11


def test_the_third_crash_inside_the_window_means_quarantine():
    fleet = fleet_of(lane_0=running(1))
    for start, crash_at in ((1, 10.0), (2, 20.0), (3, 609.9)):
        fleet.observe({"lane-0": running(start)}, LANES, crash_at - 5)
        fleet.observe({"lane-0": exited(start)}, LANES, crash_at)
    assert fleet.phase("lane-0") is Phase.QUARANTINED
    assert run_until(fleet, 610.0, 2000.0, step=1.0) == []


def test_the_owner_is_started_again_however_often_it_crashed():
    """Without one no lane could ever start again."""
    fleet, now = fleet_of(owner=running(1), lane_0=running(1)), 1.0
    for start, delay in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0), 1):
        fleet.observe({"owner": exited(start)}, LANES, now)
        assert fleet.phase("owner") is Phase.DEAD
        ((at, action),) = run_until(fleet, now, now + delay + 0.2)
        assert action == Start("owner")
        assert at - now == pytest.approx(delay, abs=0.11)
        now = at + 1.0
        fleet.observe({"owner": running(start + 1)}, LANES, now)


def test_an_owner_that_was_remembered_in_quarantine_is_started():
    fleet = Fleet()
    fleet.recall({"owner": Remembered((1.0, 2.0, 3.0), 3, quarantined=True)})
    fleet.observe({"owner": exited(3)}, LANES, 10.0)
    assert fleet.tick(10.0) == [Start("owner")]


def test_a_third_crash_outside_the_window_does_not():
    fleet = fleet_of(lane_0=running(1))
    for start, crash_at in ((1, 10.0), (2, 20.0), (3, 610.0)):
        fleet.observe({"lane-0": running(start)}, LANES, crash_at - 5)
        fleet.observe({"lane-0": exited(start)}, LANES, crash_at)
    assert fleet.phase("lane-0") is Phase.DEAD


def test_crashes_between_two_snapshots_are_seen_by_the_number_of_starts():
    fleet = fleet_of(lane_0=running(1))
    fleet.observe({"lane-0": exited(1)}, LANES, 10.0)
    fleet.observe({"lane-0": exited(2)}, LANES, 12.0)
    fleet.observe({"lane-0": exited(2)}, LANES, 13.0)  # nothing new
    assert fleet.phase("lane-0") is Phase.DEAD
    fleet.observe({"lane-0": exited(3)}, LANES, 14.0)
    assert fleet.phase("lane-0") is Phase.QUARANTINED


def test_a_stop_on_request_is_no_crash_and_is_left_alone():
    fleet = fleet_of(lane_0=running(1))
    fleet.observe({"lane-0": Observed(running=False, starts=1)}, LANES, 5.0)
    assert fleet.phase("lane-0") is Phase.DRAINING
    assert run_until(fleet, 5.0, 100.0, step=1.0) == []


def test_silence_makes_suspect_then_kills_once():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 1.0)
    fleet.tick(5.9)
    assert fleet.phase("lane-0") is Phase.READY
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 1.0)
    actions = run_until(fleet, 1.0, 40.0)
    assert [action for _, action in actions] == [Kill("lane-0")]
    assert 16.0 <= actions[0][0] <= 16.2
    assert fleet.phase("lane-0") is Phase.SUSPECT


def test_the_owner_gives_no_signs_of_life_and_is_not_killed_for_it():
    fleet = fleet_of(owner=running(1), lane_0=running(1))
    assert run_until(fleet, 0.0, 100.0, step=1.0) == []  # a lane that has never answered is still starting
    assert fleet.phase("lane-0") is Phase.STARTING


def test_a_lane_that_never_answers_is_killed_by_its_limit_once_the_region_can_be_had():
    frozen = Kill("lane-0", "it does not become ready")
    fleet = fleet_of(lane_0=running(1))
    assert run_until(fleet, 0.0, 602.0, step=1.0) == [(600.0, frozen)]
    fleet = fleet_of(lane_0=running(1))
    fleet.owner_ready(False, 0.0)
    assert run_until(fleet, 0.0, 5000.0, step=1.0) == []
    fleet.owner_ready(True, 5000.0)
    fleet.owner_ready(True, 5300.0)  # says so again and again
    assert run_until(fleet, 5000.0, 5602.0, step=1.0) == [(5600.0, frozen)]
    fleet.observe({"lane-0": exited(1, -9)}, LANES, 5602.0)
    fleet.observe({"lane-0": running(2)}, LANES, 5603.0)
    assert run_until(fleet, 5603.0, 6202.0, step=1.0) == []


def test_warming_and_draining_are_what_the_lane_says():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 1.0, said=Said.WARMING)
    assert fleet.phase("lane-0") is Phase.WARMING
    fleet.answered("lane-0", 2.0)
    assert fleet.phase("lane-0") is Phase.READY
    fleet.answered("lane-0", 3.0, said=Said.DRAINING)
    assert fleet.phase("lane-0") is Phase.DRAINING


def test_drained_on_request_until_undrained_and_watched_all_the_while():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 1.0)
    fleet.drain("lane-0")
    assert fleet.phase("lane-0") is Phase.DRAINING
    assert [action for _, action in run_until(fleet, 1.0, 20.0)] == [Kill("lane-0")]
    fleet.observe({"lane-0": exited(1, -9)}, LANES, 20.0)
    assert fleet.phase("lane-0") is Phase.DEAD
    fleet.observe({"lane-0": running(2)}, LANES, 21.0)
    fleet.answered("lane-0", 22.0)
    assert fleet.phase("lane-0") is Phase.DRAINING  # a new process is not a reason to serve
    fleet.undrain("lane-0", 23.0)
    assert fleet.phase("lane-0") is Phase.READY


def test_undrain_starts_what_was_stopped_or_is_in_quarantine():
    fleet = fleet_of(lane_0=Observed(running=False, starts=1), lane_1=exited(1))
    assert fleet.phase("lane-0") is Phase.DRAINING
    for starts in (2, 3):
        fleet.observe({"lane-0": Observed(running=False, starts=1), "lane-1": exited(starts)}, LANES, float(starts))
    assert fleet.phase("lane-1") is Phase.QUARANTINED
    for name in ("lane-0", "lane-1"):
        fleet.undrain(name, 10.0)
    assert fleet.tick(10.0) == [Start("lane-0"), Start("lane-1")]
    fleet.observe({"lane-0": running(2), "lane-1": exited(4)}, LANES, 11.0)
    assert fleet.phase("lane-1") is Phase.DEAD  # the crashes before were forgiven


def test_undrain_of_a_dead_lane_starts_it_now_and_the_backoff_from_the_beginning():
    fleet = fleet_of(lane_0=exited(1))
    fleet.observe({"lane-0": exited(2)}, LANES, 1.0)
    fleet.undrain("lane-0", 1.0)
    assert fleet.tick(1.0) == [Start("lane-0")]
    fleet.undrain("lane-0", 1.1)
    assert fleet.tick(1.1) == []  # asked once
    fleet.observe({"lane-0": running(3)}, LANES, 2.0)
    fleet = fleet_of(lane_0=exited(1))
    fleet.undrain("lane-0", 0.0)
    fleet.observe({"lane-0": exited(2)}, LANES, 1.0)
    assert fleet.tick(1.0 + LIMITS.backoff_first_s) == [Start("lane-0")]


def test_the_next_fleet_forgets_no_crash_and_counts_none_twice():
    first = fleet_of(lane_0=exited(1), lane_1=running(1))
    first.observe({"lane-0": exited(2), "lane-1": running(1)}, LANES, 5.0)
    first.drain("lane-1")
    told = first.remember()
    assert {name: (len(each.crashes), each.starts, each.drained) for name, each in told.items()} == {
        "lane-0": (2, 2, False), "lane-1": (0, 0, True),
    }  # fmt: skip
    second = Fleet()
    second.recall(told)
    second.observe({"lane-0": exited(2), "lane-1": running(1)}, LANES, 6.0)
    second.answered("lane-1", 6.0)
    assert (second.phase("lane-0"), second.phase("lane-1")) == (Phase.DEAD, Phase.DRAINING)
    assert second.tick(6.0) == [Start("lane-0")]
    second.observe({"lane-0": exited(3), "lane-1": running(1)}, LANES, 7.0)
    assert second.phase("lane-0") is Phase.QUARANTINED
    third = Fleet()
    third.recall(second.remember())
    assert third.remember() == second.remember()
    third.observe({"lane-0": exited(3), "lane-1": running(1)}, LANES, 8.0)
    assert third.phase("lane-0") is Phase.QUARANTINED
    assert run_until(third, 8.0, 500.0, step=1.0) == []
    fourth = Fleet()
    fourth.recall(told)  # two crashes; a third one came while there was no coordinator
    fourth.observe({"lane-0": exited(3), "lane-1": running(1)}, LANES, 9.0)
    assert fourth.phase("lane-0") is Phase.QUARANTINED


STOPPED = Observed(running=False, starts=1)


def test_a_news_of_others_does_not_undo_an_undrain():
    fleet = fleet_of(lane_0=STOPPED, lane_1=running(1))
    fleet.undrain("lane-0", 1.0)
    fleet.observe({"lane-0": STOPPED, "lane-1": exited(1)}, LANES, 1.1)
    assert fleet.tick(1.2) == [Start("lane-0")]
    fleet.observe({"lane-0": STOPPED, "lane-1": running(2)}, LANES, 1.3)
    assert fleet.tick(1.4) == []  # asked once
    fleet.observe({"lane-0": running(2), "lane-1": running(2)}, LANES, 1.5)
    fleet.answered("lane-0", 1.6)
    assert fleet.phase("lane-0") is Phase.READY


@pytest.mark.parametrize("stopped_before", [True, False])
def test_the_next_fleet_finishes_a_restart(stopped_before):
    first = fleet_of(lane_0=running(1))
    first.answered("lane-0", 0.0)
    first.drain("lane-0", returns=True)
    assert first.returns("lane-0")
    if stopped_before:
        first.observe({"lane-0": STOPPED}, LANES, 1.0)
        assert first.tick(1.0) == []  # who stopped it will undrain it
    second = Fleet()
    second.recall(first.remember())
    if not stopped_before:
        second.observe({"lane-0": running(1)}, LANES, 2.0)
        second.answered("lane-0", 2.0)
        assert second.phase("lane-0") is Phase.READY
    second.observe({"lane-0": STOPPED}, LANES, 3.0)
    assert second.returns("lane-0")
    third = Fleet()
    third.recall(second.remember())  # nor does it matter how many coordinators die
    third.observe({"lane-0": STOPPED}, LANES, 4.0)
    for fleet in (second, third):
        assert fleet.tick(4.0) == [Start("lane-0")]
        fleet.observe({"lane-0": running(2)}, LANES, 5.0)
        fleet.answered("lane-0", 5.0)
        assert fleet.phase("lane-0") is Phase.READY
        assert not fleet.returns("lane-0")
        assert fleet.remember() == {}


@pytest.mark.parametrize("otherwise", ["drained", "undrained", "crashed"])
def test_a_restart_that_became_something_else_is_not_finished(otherwise):
    first = fleet_of(lane_0=running(1))
    first.drain("lane-0", returns=True)
    second = Fleet()
    second.recall(first.remember())
    second.observe({"lane-0": running(1)}, LANES, 1.0)
    match otherwise:
        case "drained":
            second.drain("lane-0")
        case "undrained":
            second.undrain("lane-0", 1.0)
        case "crashed":
            second.observe({"lane-0": exited(1)}, LANES, 1.0)
    assert not second.returns("lane-0")
    if otherwise != "crashed":
        second.observe({"lane-0": STOPPED}, LANES, 2.0)
        assert run_until(second, 2.0, 100.0, step=1.0) == []


def test_a_lane_that_is_no_more_is_forgotten():
    fleet = fleet_of(lane_0=running(1), lane_1=exited(1))
    fleet.observe({"lane-0": running(1)}, {"lane-0"}, 1.0)
    assert fleet.tick(100.0) == []
    assert fleet.remember() == {}


def test_a_suspected_lane_is_up_again_with_its_next_sign_of_life():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 1.0)
    fleet.suspected("lane-0")
    assert fleet.phase("lane-0") is Phase.SUSPECT
    fleet.answered("lane-0", 1.5)
    assert fleet.phase("lane-0") is Phase.READY


def test_silence_while_the_coordinator_itself_slept_says_nothing():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 0.0)
    fleet.tick(0.0)
    assert fleet.tick(100.0) == []
    assert fleet.phase("lane-0") is Phase.READY
    assert run_until(fleet, 100.1, 114.8) == []
    assert [action for _, action in run_until(fleet, 114.9, 116.0)] == [Kill("lane-0")]


STUCK = Kill("lane-0", "its step stands still")


def watched(fleet, begin, end, still, p99_s):
    """A sign of life every half second, with `still(now)` seconds since the step got on; all actions, with times."""
    actions = []
    for k in range(round((end - begin) / 0.1)):
        now = round(begin + k * 0.1, 3)
        if k % 5 == 0:
            fleet.answered("lane-0", now, Progress(still(now), p99_s))
        actions += [(now, action) for action in fleet.tick(now)]
    return actions


def test_a_lane_that_answers_while_its_step_stands_still_is_suspected_then_killed_once():
    fleet = fleet_of(lane_0=running(1))
    assert watched(fleet, 1.0, 5.9, lambda now: now - 1, 0.001) == []
    assert fleet.phase("lane-0") is Phase.READY
    assert watched(fleet, 6.0, 15.9, lambda now: now - 1, 0.001) == []
    assert fleet.phase("lane-0") is Phase.SUSPECT
    assert watched(fleet, 16.0, 40.0, lambda now: now - 1, 0.001) == [(16.0, STUCK)]


def test_a_step_of_a_slow_kind_has_ten_and_twenty_times_what_it_takes():
    fleet = fleet_of(lane_0=running(1))
    assert watched(fleet, 0.0, 29.9, lambda now: now, 3.0) == []
    assert fleet.phase("lane-0") is Phase.READY
    assert watched(fleet, 30.0, 59.9, lambda now: now, 3.0) == []
    assert fleet.phase("lane-0") is Phase.SUSPECT
    assert watched(fleet, 60.0, 61.0, lambda now: now, 3.0) == [(60.0, STUCK)]


def test_a_long_step_that_gets_on_layer_by_layer_is_left_alone():
    fleet = fleet_of(lane_0=running(1))
    assert watched(fleet, 0.0, 600.0, lambda now: now % 4, 0.0) == []
    assert fleet.phase("lane-0") is Phase.READY


def test_a_step_that_gets_on_after_all_makes_its_lane_well_again():
    fleet = fleet_of(lane_0=running(1))
    watched(fleet, 0.0, 8.0, lambda now: now, 0.0)
    assert fleet.phase("lane-0") is Phase.SUSPECT
    fleet.answered("lane-0", 8.0, Progress(0.0, 0.0))
    assert fleet.phase("lane-0") is Phase.READY
    fleet.answered("lane-0", 8.5)  # idle: nothing can stand still
    assert watched(fleet, 8.5, 9.0, lambda now: 0.0, 0.0) == []


def test_a_step_does_not_stand_still_because_the_coordinator_slept():
    fleet = fleet_of(lane_0=running(1))
    fleet.answered("lane-0", 0.0, Progress(0.0, 0.0))
    fleet.tick(0.0)
    assert fleet.tick(100.0) == []
    assert fleet.phase("lane-0") is Phase.READY


def test_the_next_life_of_a_stuck_lane_begins_unsuspected():
    fleet = fleet_of(lane_0=running(1))
    assert watched(fleet, 0.0, 16.0, lambda now: now, 0.0) == [(15.0, STUCK)]
    fleet.observe({"lane-0": exited(1, -9)}, LANES, 16.0)
    fleet.observe({"lane-0": running(2)}, LANES, 17.0)
    fleet.answered("lane-0", 18.0)
    assert fleet.phase("lane-0") is Phase.READY
    assert fleet.tick(18.1) == []


def test_a_new_fleet_starts_what_died_before_it():
    fleet = fleet_of(now=50.0, owner=running(1), lane_0=exited(4), lane_1=running(2))
    assert run_until(fleet, 50.0, 60.0) == [(50.5, Start("lane-0"))]
    assert fleet.restarts("lane-0") == 3


def test_backoff_doubles_to_its_limit_and_begins_again_after_a_stable_life():
    backoff = Backoff(LIMITS)
    assert [backoff.after_life_of(1.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.after_life_of(LIMITS.stable_s - 0.001) == 30
    assert [backoff.after_life_of(LIMITS.stable_s), backoff.after_life_of(0)] == [0.5, 1]


EVENTS = st.sampled_from(["crash", "answer", "suspect", "pass", "pass", "pass", "fail", "stop"])


@settings(max_examples=200)
@given(st.lists(st.tuples(EVENTS, st.sampled_from(["owner", "lane-0", "lane-1"]), st.floats(0.05, 12.0)), max_size=60))
def test_whatever_happens_at_most_one_action_is_outstanding_and_the_dead_stay_dead(events):
    """Drives a model of the supervisor by the fleet's own actions."""
    fleet, now = Fleet(), 0.0
    world = {name: running(1) for name in ("owner", "lane-0", "lane-1")}
    outstanding, crashes = {}, {name: [] for name in world}

    def see():
        fleet.observe(dict(world), LANES, now)

    def crash(name):
        world[name] = exited(world[name].starts)
        crashes[name].append(now)
        outstanding.pop(name, None)
        see()

    see()
    for event, name, seconds in events:
        now += seconds
        if event == "crash" and world[name].running:
            crash(name)
        elif event == "stop" and world[name].running:
            world[name] = Observed(running=False, starts=world[name].starts)
            outstanding.pop(name, None)
            see()
        elif event == "answer":
            fleet.answered(name, now)
        elif event == "suspect":
            fleet.suspected(name)
        for action in fleet.tick(now):
            assert action.name not in outstanding
            assert fleet.phase(action.name) not in (Phase.QUARANTINED, Phase.DRAINING)
            outstanding[action.name] = action
            if event == "fail":
                del outstanding[action.name]
                fleet.failed(action, now)
            elif isinstance(action, Start):
                assert not world[action.name].running
                world[action.name] = running(world[action.name].starts + 1)
                del outstanding[action.name]
                see()
            else:
                assert action.name in LANES
                crash(action.name)
        for each, times in crashes.items():
            recent = [at for at in times if times[-1] - at < LIMITS.crash_window_s]
            quarantined = each != "owner" and len(recent) >= LIMITS.crashes_to_quarantine
            assert (fleet.phase(each) is Phase.QUARANTINED) == quarantined
            assert fleet.restarts(each) == world[each].starts - 1
