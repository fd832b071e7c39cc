"""Measuring by turns: one at a time, given back whatever happens, and never waited for without an end."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from lanes import limits
from lanes.quiet import quiet


class Time:
    def __init__(self):
        self.now, self.slept = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)


def test_one_at_a_time(tmp_path):
    inside, most, guard = [0], [0], threading.Lock()

    def measure():
        with quiet(tmp_path, 60.0) as alone:
            assert alone
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            for _ in range(100):
                os.sched_yield()
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=measure) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most[0], inside[0]) == (1, 0)


def test_who_has_waited_long_enough_goes_on_and_gives_nothing_back_that_is_not_its_own(tmp_path):
    time = Time()
    with quiet(tmp_path) as alone:
        assert alone
        with quiet(tmp_path, clock=time.clock, sleep=time.sleep) as second:
            assert not second
        assert limits.MEASURING_WAIT_S <= time.now < limits.MEASURING_WAIT_S + 0.1
        with quiet(tmp_path, 0.0) as third:
            assert not third
    with quiet(tmp_path, 0.0) as fourth:
        assert fourth


def test_where_there_are_no_locks_nobody_waits(tmp_path, monkeypatch):
    def none(lock, what):
        raise OSError(errno.ENOLCK, "no locks")

    time = Time()
    monkeypatch.setattr("fcntl.flock", none)
    with quiet(tmp_path, clock=time.clock, sleep=time.sleep) as alone:
        assert not alone
    assert time.now == 0


def test_an_error_inside_gives_it_back(tmp_path):
    with pytest.raises(RuntimeError), quiet(tmp_path):
        raise RuntimeError("no rate")
    with quiet(tmp_path, 0.0) as alone:
        assert alone
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_killed_holder_holds_nothing(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from lanes.quiet import quiet\n"
        "with quiet(Path(sys.argv[1])): print('in', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "in\n"
        with quiet(tmp_path, 0.0) as alone:
            assert not alone
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with quiet(tmp_path, 60.0) as alone:
        assert alone
