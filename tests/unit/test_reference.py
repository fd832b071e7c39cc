"""docs/reference is what the code says, and names everything that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli import COMMANDS
from coordinator.doors.http import ROUTES
from laneproto.v1 import serve_pb2
from scripts.reference import pages

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def test_the_pages_are_those_of_the_code(made: dict[str, str]) -> None:
    found = {page.name: page.read_text() for page in FOLDER.glob("*")}
    assert found == made, "run scripts/gen-reference"


def test_everything_is_named(made: dict[str, str]) -> None:
    assert [name for name in COMMANDS if f"## expressway {name}\n" not in made["commands.md"]] == []
    assert "## expressway bench compare\n" in made["commands.md"]
    routes = [f"## {route.method.upper()} {route.path}\n" for route in ROUTES]
    assert [line for line in routes if line not in made["http.md"]] == []
    for name, message in serve_pb2.DESCRIPTOR.message_types_by_name.items():
        assert f"### {name}\n" in made["grpc.md"]
        assert [field.name for field in message.fields if f"| `{field.name}` |" not in made["grpc.md"]] == []
