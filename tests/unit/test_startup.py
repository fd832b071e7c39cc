"""A start: why a process ended, as one that fails says it, and the file that says where the cluster is."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from coordinator import limits
from coordinator.config import Address, LaneOptions, ServeConfig
from coordinator.cores import Layout
from coordinator.errors import RunDirError
from coordinator.host import cluster
from coordinator.host.startup import Ready, explain_exit
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


async def test_a_cluster_file_is_written_once_there_is_room_again(tmp_path, monkeypatch):
    """The disk was full when the cluster became ready, and nothing changes afterwards: it says so all the same."""
    monkeypatch.setattr(limits, "RUN_FILE_RETRY_S", 0.01)
    here = Address("127.0.0.1", 1)
    config = ServeConfig(LaneOptions(tmp_path, "cpu", 1), "t", 1, "local", here, here, None, None, 0.0, 60.0)
    written: list[object] = []
    refused = iter([False, True, True, False])

    class Files:
        path = tmp_path

        def socket(self, name: str) -> Path:
            return tmp_path / name

        def write_cluster(self, content: Mapping[str, object]) -> None:
            if next(refused):
                raise RunDirError("no space")
            written.append(content["ready"])

    class Still:
        version, keepers = 1, {}

        async def start_all(self) -> None: ...

        async def change(self, seen: int) -> None:
            await asyncio.Event().wait()

    async def ready(*_: object) -> Ready:
        return Ready("m", 1.0)

    monkeypatch.setattr(cluster, "wait_ready", ready)
    living = asyncio.create_task(cluster._live(Still(), config, Layout(((0,),), ()), Files(), print, lambda _: None))
    async with asyncio.timeout(60):
        while len(written) < 2:
            await asyncio.sleep(0.01)
    living.cancel()
    assert written == [False, True]
