"""Nothing that serves may fail because a line cannot be written: logs are lost, requests are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SET_UPS = {
    "coordinator": "from coordinator.logs import configure_logging as c; c(json_lines={json}, process='x')",
    "lane": "from lanes.logs import configure_logging as c; c(json_lines={json}, lane='x')",
    "owner": "from shared_experts.cli_own import configure_log as c; c(json={json})",
}
WORK = """
import structlog
for number in range(2000):  # more than any buffer holds
    structlog.get_logger().info("dispatched", request_id="r" * 24, number=number)
print("done")
"""


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("process", SET_UPS)
def test_a_log_that_cannot_be_written_fails_nobody(process: str, json_lines: bool) -> None:
    program = SET_UPS[process].format(json=json_lines) + WORK
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"done\n"


@pytest.mark.parametrize("process", SET_UPS)
def test_a_log_whose_reader_is_gone_fails_nobody(process: str) -> None:
    program = SET_UPS[process].format(json=True) + WORK
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert child.stdout is not None
    child.stderr.close()
    assert child.stdout.read() == b"done\n"
    child.stdout.close()
    child.wait(60)


COMMANDS = {
    "text": ("--help",),
    "json": ("verify", "/nowhere", "--json"),
}


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_whose_output_cannot_be_written_fails_in_the_usual_shape(
    words: tuple[str, ...], unbuffered: str
) -> None:
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-m", "coordinator.cli", *words]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, timeout=60, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_caller_closed_its_files_runs(closed: str) -> None:
    program = "import os, sys; from coordinator.cli import main; main(['doctor', '--help'])"
    done = subprocess.run(
        f'"{sys.executable}" -c "{program}" {closed}', shell=True, capture_output=True, timeout=60, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Usage" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
