"""What a coordinator that returns has to know about the fleet, in one small file of the run directory.

Not here: what it means (fleet). Invariants: the file is replaced in one step; one that cannot be read is no memory, and
never a reason not to serve. Times are of the host's monotonic clock: the run directory does not outlive a boot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator import limits
from coordinator.fleet.states import Remembered

log = structlog.get_logger()


class _Process(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    crashes: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=64)] = []
    starts: Annotated[int, Field(ge=0)] = 0
    quarantined: bool = False
    drained: bool = False
    returns: bool = False


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    processes: dict[str, _Process]


class FleetMemory:
    """The file. `save` writes only what has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Mapping[str, Remembered] = {}

    def load(self) -> dict[str, Remembered]:
        """What the coordinator before this one saved."""
        try:
            with open(self._path, "rb", opener=_open) as file:
                data = file.read(limits.FLEET_FILE_BYTES + 1)
            if len(data) > limits.FLEET_FILE_BYTES:
                raise ValueError("too long")
            content = _File.model_validate_json(data)
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError, ValueError) as error:
            log.warning("the fleet's memory cannot be read", reason=type(error).__name__)
            return {}
        return {
            name: Remembered(tuple(each.crashes), each.starts, each.quarantined, each.drained, each.returns)
            for name, each in content.processes.items()
        }

    def save(self, remembered: Mapping[str, Remembered]) -> None:
        """Keep this for the next one."""
        if remembered == self._written:
            return
        content = _File(
            processes={
                name: _Process(
                    crashes=list(each.crashes[-64:]), starts=each.starts, quarantined=each.quarantined,
                    drained=each.drained, returns=each.returns,
                )
                for name, each in remembered.items()
            }
        )  # fmt: skip
        draft = self._path.with_name(self._path.name + ".new")
        try:
            with open(draft, "wb", opener=_open) as file:
                file.write(content.model_dump_json().encode())
            os.replace(draft, self._path)
        except OSError as error:
            log.warning("the fleet's memory cannot be written", reason=error.strerror)
            return
        self._written = dict(remembered)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
