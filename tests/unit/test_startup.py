"""Why a process ended, as a start that fails says it."""

from coordinator.host.startup import explain_exit
from coordinator.host.supervisor import Keeper, Managed
from coordinator.launchers.base import ProcessSpec


def keeper(tmp_path, exit_code, log):
    path = tmp_path / "lane-0.log"
    path.write_text(log)
    return Keeper(Managed(ProcessSpec("lane-0", ("x",), {}, path)), exit_code=exit_code)


def test_a_process_that_gave_a_reason_is_quoted(tmp_path):
    ended = keeper(tmp_path, 1, "something\nerror: bad_pack: /p: broken\n")
    assert explain_exit("lane-0", ended) == "lane-0 ended with code 1: bad_pack: /p: broken"


def test_one_that_gave_none_is_followed_by_its_last_lines(tmp_path):
    ended = keeper(tmp_path, -9, "\n".join(f"line {k}" for k in range(20)))
    first, *more = explain_exit("lane-0", ended).splitlines()
    assert first == f"lane-0 was killed by signal 9; see {tmp_path}/lane-0.log"
    assert more == [f"    line {k}" for k in range(8, 20)]


def test_one_that_wrote_nothing(tmp_path):
    assert explain_exit("lane-0", keeper(tmp_path, 3, "")).endswith("(it wrote nothing)")
