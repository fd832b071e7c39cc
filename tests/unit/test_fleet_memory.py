"""The fleet's memory as a file: saved is loaded, and nothing that lies there keeps a coordinator from serving."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.fleet.memory import FleetMemory
from coordinator.fleet.states import Remembered
from coordinator.host.vigil import Vigil

TOLD = {
    "lane-0": Remembered((1.5, 2.5), 7, quarantined=True),
    "lane-1": Remembered(drained=True),
    "lane-2": Remembered(returns=True),
}


def test_saved_and_loaded_and_written_only_when_it_changed(tmp_path: Path) -> None:
    memory = FleetMemory(tmp_path / "fleet.json")
    assert memory.load() == {}
    memory.save(TOLD)
    assert FleetMemory(tmp_path / "fleet.json").load() == TOLD
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.json"]
    assert (tmp_path / "fleet.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "fleet.json").unlink()
    memory.save(dict(TOLD))
    assert not (tmp_path / "fleet.json").exists()
    memory.save({})
    assert FleetMemory(tmp_path / "fleet.json").load() == {}


def test_a_directory_that_is_gone_is_no_reason_to_stop(tmp_path: Path) -> None:
    FleetMemory(tmp_path / "gone" / "fleet.json").save(TOLD)


@given(st.binary(max_size=100) | st.just(b'{"processes": {"a": {"crashes": [NaN]}}}'))
def test_whatever_lies_there_is_a_memory_or_none(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.json"
        path.write_bytes(data)
        assert FleetMemory(path).load() == {}


def test_links_and_long_files_are_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fleet.json"
    FleetMemory(path).save(TOLD)
    (tmp_path / "link").symlink_to(path)
    assert FleetMemory(tmp_path / "link").load() == {}
    monkeypatch.setattr(limits, "FLEET_FILE_BYTES", path.stat().st_size)
    assert FleetMemory(path).load() == TOLD
    monkeypatch.setattr(limits, "FLEET_FILE_BYTES", path.stat().st_size - 1)
    assert FleetMemory(path).load() == {}


def test_silence_is_overdue_at_its_limit_and_a_watcher_that_slept_accuses_nobody() -> None:
    vigil = Vigil(0.0)
    looks = [(k * 1.0, vigil.overdue(k * 1.0)) for k in range(1, 200)]
    assert next(at for at, overdue in looks if overdue) == limits.COORDINATOR_START_S
    vigil = Vigil(0.0)
    vigil.answered(10.0)
    assert not vigil.overdue(10.0 + limits.COORDINATOR_SILENT_S - 14.0)
    assert not vigil.overdue(1000.0)  # it was us
    assert not vigil.overdue(1003.0)
    later = [1003.0 + k for k in range(1, 20)]
    assert any(vigil.overdue(at) for at in later)
