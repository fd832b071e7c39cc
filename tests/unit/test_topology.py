"""The order in which cores are dealt out, from made-up hosts."""

import os

import pytest

from coordinator.cores import layout
from coordinator.host.topology import allowed_cores


def host(folder, places):
    for core, (socket, siblings) in places.items():
        own = folder / f"cpu{core}" / "topology"
        own.mkdir(parents=True)
        (own / "physical_package_id").write_text(f"{socket}\n")
        (own / "thread_siblings_list").write_text(f"{siblings}\n")
    return folder


@pytest.fixture
def may_use(monkeypatch):
    return lambda *cores: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))


def test_threads_of_one_core_go_to_one_lane(tmp_path, may_use):
    """Eight threads of four cores, numbered as hosts do: first threads first."""
    may_use(*range(8))
    order = allowed_cores(host(tmp_path, {n: (0, f"{n % 4},{n % 4 + 4}") for n in range(8)}))
    assert order == [0, 4, 1, 5, 2, 6, 3, 7]
    assert layout(order, 2, gpu=False).lanes == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_a_lane_has_one_socket(tmp_path, may_use):
    may_use(0, 1, 2, 3)
    order = allowed_cores(host(tmp_path, {0: (1, "0"), 1: (0, "1"), 2: (1, "2"), 3: (0, "3")}))
    assert layout(order, 2, gpu=False).lanes == ((1, 3), (0, 2))


@pytest.mark.parametrize("siblings", ["", "none", None])
def test_a_host_that_does_not_say_has_its_cores_by_number(tmp_path, may_use, siblings):
    may_use(5, 2, 11)
    if siblings is not None:
        host(tmp_path, dict.fromkeys((5, 2, 11), (0, siblings)))
    assert allowed_cores(tmp_path) == [2, 5, 11]


def test_only_what_may_be_used_is_dealt_out(tmp_path, may_use):
    may_use(1, 5)
    assert allowed_cores(host(tmp_path, {n: (0, f"{n % 4}-{n % 4}") for n in range(8)})) == [1, 5]


def test_of_this_host_every_core_once():
    assert sorted(allowed_cores()) == sorted(os.sched_getaffinity(0))
