"""Threads that are pinned stay, all others go to the engine's core. In a process whose threads are known."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys, threading
from types import SimpleNamespace
from lanes.experts.native import ExpertKernel
from lanes.startup import settle_thread
from tests.fakes.records import FakeRegion

device, cores = sys.argv[1], tuple(sorted(os.sched_getaffinity(0)))
kernel = ExpertKernel(FakeRegion("q4g32", 96, 64, 1, 1).layout, cores=(cores[1], cores[1]))
parked, settled, started, end = (threading.Event() for _ in range(4))
of = {}

def native(name, work):
    def run():
        of[name] = threading.get_native_id()
        work()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread

def door():
    parked.set(), settled.wait(60)
    native("started by the door", lambda: (started.set(), end.wait(60)))
    end.wait(60)

def pool():
    for name in os.listdir("/proc/self/task"):
        if open(f"/proc/self/task/{name}/comm").read().strip() == "experts":
            return sorted(os.sched_getaffinity(int(name)))

native("door", door)
parked.wait(60)
while pool() != [cores[1]]:
    pass
lane = SimpleNamespace(device=device, pinned=True, cores=cores)
native("engine", lambda: (settle_thread(lane), settled.set(), end.wait(60)))
started.wait(60)
where = {name: sorted(os.sched_getaffinity(thread)) for name, thread in of.items()}
where["pool"] = pool()
where["main"] = sorted(os.sched_getaffinity(0))
print(json.dumps({"cores": cores, "where": where}))
end.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nobody_else_is_where_the_pool_computes(device):
    done = subprocess.run([sys.executable, "-c", PROGRAM, device], check=True, stdout=subprocess.PIPE, timeout=300)
    found = json.loads(done.stdout)
    first, second, *_ = cores = found["cores"]
    others = [first] if device == "cuda" else cores  # a lane on the CPU has no such pool beside its engine
    assert found["where"] == {
        "engine": [first], "pool": [second], "door": others, "started by the door": others, "main": others,
    }  # fmt: skip
