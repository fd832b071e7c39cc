"""Processes that benches start: gone when whoever started them is gone, killed included."""

import os
import signal
import subprocess
import sys

from bench import tied

ENDLESS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
STARTS = (
    f"import subprocess, time; from bench import tied; subprocess.Popen(tied.argv('-c', {ENDLESS!r})); time.sleep(600)"
)


def test_a_killed_parent_takes_them_along():
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as said:
        child = int(said.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        assert said.read() == b""  # until nobody holds the pipe: the child has ended, too


def test_a_process_whose_parent_is_another_one_does_not_begin():
    words = tied.argv("-c", "print('began')")
    words[3] = "1"
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the parent is gone\n")
