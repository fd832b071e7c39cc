"""`deploy/ray/serve_every_host.py` on a real Ray of one host; the server is a stand-in that notes what it hears."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/ray/serve_every_host.py"
LIMIT_S = 120.0
STAND_IN = """#!{python}
import os, signal, sys, time
def told(number, frame):
    open({folder!r} + "/told", "a").write("term\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
open({folder!r} + "/started", "a").write(f"{{os.getpid()}} {{' '.join(sys.argv[1:])}}\\n")
while True:
    time.sleep(0.1)
"""


def wait_for(what, process):
    until = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_server_runs_on_the_host_is_started_again_and_ends_with_us(tmp_path):
    program = tmp_path / "bin/expressway"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "HOME": str(tmp_path),  # Ray keeps its token there
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every port on 127.0.0.1
    }
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "/pack", "--address", "local", "--join-port", "17443",
         "--", "--lanes", "2", "--", "--page", "off"],
        env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip

    def starts(count):
        lines = (tmp_path / "started").read_text().splitlines() if (tmp_path / "started").exists() else []
        return lines if len(lines) >= count else None

    try:
        first = wait_for(lambda: starts(1), process)[0].split(" ")
        assert first[1:] == [
            "serve", "/pack", "--join-at", "127.0.0.1:17443", "--log-json", "--lanes", "2", "--page", "off",
        ]  # fmt: skip
        os.kill(int(first[0]), signal.SIGKILL)
        second = int(wait_for(lambda: starts(2), process)[1].split(" ")[0])
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 0, said[-2000:]
        assert (tmp_path / "told").read_text() == "term\n"
        assert not Path(f"/proc/{second}").exists()
        assert "again in 5 s" in said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
