"""What is happening while processes come up, for people, on stderr.

Invariant: nothing of it reaches stdout, and a terminal is left as it was found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping


class Progress:
    """What is happening while the cluster comes up: one changing line on a terminal, else a line per change."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = ""

    def show(self, states: Mapping[str, str]) -> None:
        """Show the states if they have changed."""
        line = ", ".join(f"{name} {state}" for name, state in sorted(states.items(), key=_owner_first))
        if line == self._shown:
            return
        self._shown = line
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line, whatever comes next. Idempotent."""
        if self._terminal and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._shown = ""


def _owner_first(item: tuple[str, str]) -> tuple[bool, int, str]:
    name = item[0]
    return (name != "owner", int(name.removeprefix("lane-")) if name.startswith("lane-") else -1, name)
