from __future__ import annotations

import re
from pathlib import Path

import grpc

from coordinator import errors
from coordinator.errors import CoordinatorError

OURS = "coordinator.errors."


def _all(kind: type[CoordinatorError]) -> list[type[CoordinatorError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _all(child))]


def _drawn() -> dict[str, tuple[str, bool, int, str]]:
    rows = re.findall(r"([A-Z]\w+) +([a-z_]+) +(yes|no) +(\d{3}) +([A-Z_]+)$", errors.__doc__ or "", re.MULTILINE)
    return {name: (code, retryable == "yes", int(http), status) for name, code, retryable, http, status in rows}


def test_the_drawing_is_the_table() -> None:
    drawn = _drawn()
    groups = {"CoordinatorError", "RequestError", "Refused", "LaneError", "Gone", "SetupError", "OperationError"}
    classes = {kind.__name__: kind for kind in _all(CoordinatorError) if kind.__module__.startswith(OURS)}
    assert set(drawn) == set(classes) - groups
    for name, row in drawn.items():
        kind = classes[name]
        assert (kind.code, kind.retryable, kind.http, kind.grpc) == row, name


def test_codes_are_unique_and_statuses_exist() -> None:
    kinds = [kind for kind in _all(CoordinatorError) if kind.__module__.startswith(OURS)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert grpc.StatusCode[kind.grpc] is not grpc.StatusCode.OK


def test_the_page_of_the_doors_has_every_code_that_a_client_may_see() -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    rows = dict(re.findall(r"^\| ([45]\d\d[\d, ]*) \| (.+) \|$", page, re.MULTILINE))
    written = {(code, star == "*") for row in rows.values() for code, star in re.findall(r"`(\w+)`(\*?)", row)}
    seen = [*_all(errors.RequestError), *_all(errors.Refused), *_all(errors.LaneError), errors.DeadlineExceeded]
    groups = {errors.RequestError, errors.Refused, errors.LaneError}
    expected = {(kind.code, kind.retryable) for kind in [*seen, errors.InternalError] if kind not in groups}
    assert written == expected
