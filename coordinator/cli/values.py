"""Values of options: words become checked values while the command line is parsed.

Not here: what the values mean (config). Invariant: a value that is wrong whatever the host and the pack is wrong usage
(exit code 2), not a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from coordinator.config import (
    CONTEXT_MAX,
    CONTEXT_MIN,
    PREFILL_CHUNK_MAX,
    parse_door,
    parse_host_door,
    parse_http,
    parse_page,
    parse_park,
    parse_size,
)
from coordinator.errors import SetupError
from coordinator.host.rundir import check_name


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions of click
    """What `parse` makes of the words; its `SetupError` is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click calls it; a default may be a value already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except SetupError as error:
            self.fail(error.message, param, ctx)


SIZE = Parsed("size", parse_size)
PARK = Parsed("size", parse_park)
HTTP = Parsed("address", parse_http)
GRPC = Parsed("address", parse_door)
PAGE = Parsed("address", parse_page)
HOSTS_AT = Parsed("address", parse_host_door)
CONTEXT = click.IntRange(CONTEXT_MIN, CONTEXT_MAX)
CHUNK = click.IntRange(1, PREFILL_CHUNK_MAX)
CLUSTER = Parsed("name", check_name)
