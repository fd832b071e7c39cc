"""The times of one process must fit into the patience of the next: the tables of lane and coordinator side by side."""

from coordinator import limits as coordinator
from coordinator.fleet.states import FleetLimits
from lanes import limits as lane
from lanes import watchdog

ROOM_TO_EXIT_S = 2.0


def test_whoever_stops_a_process_waits_longer_than_that_process_may_take():
    own_end_s = lane.DRAIN_S + lane.FLUSH_S + lane.STOP_GRACE_S
    assert own_end_s + ROOM_TO_EXIT_S <= coordinator.LANE_STOP_S <= coordinator.STOP_GRACE_MAX_S
    assert coordinator.DOOR_CLOSE_S + coordinator.GRPC_CLOSE_S + ROOM_TO_EXIT_S <= coordinator.COORDINATOR_STOP_S


def test_a_lane_says_what_it_does_often_enough_and_gives_its_clients_up_before_it_is_suspected_itself():
    assert 2 * lane.WATCH_INTERVAL_S < coordinator.LANE_SUSPECT_S
    assert lane.SLOW_READER_S < coordinator.LANE_SUSPECT_S
    assert coordinator.LANE_SUSPECT_S < coordinator.LANE_KILL_S
    assert coordinator.OWN_STALL_S < coordinator.LANE_SUSPECT_S


def test_the_table_of_the_fleet_is_the_contract():
    fleet = FleetLimits()
    assert (fleet.suspect_after_s, fleet.kill_after_s) == (5.0, 15.0)
    assert (fleet.suspect_steps, fleet.kill_steps) == (10.0, 20.0)
    assert (fleet.backoff_first_s, fleet.backoff_max_s) == (0.5, 30.0)
    assert (fleet.crashes_to_quarantine, fleet.crash_window_s) == (3, 600.0)


def test_the_longest_step_that_a_lane_can_tell_apart_is_longer_than_any_that_is_waited_for():
    assert watchdog.upper_ns(watchdog.BUCKETS - 1) / 1e9 > 600
