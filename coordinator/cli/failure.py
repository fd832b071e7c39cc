"""How every command says that it failed: one line for people, and with `--json` one for programs.

Not here: which errors there are. Invariant: the last line on stderr is `error: CODE: reason`; stdout has one JSON
object exactly when JSON was asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence

_JSON_OPTIONS = ("--json", "--ready-json")


def fail(words: Sequence[str], code: str, message: str, exit_code: int) -> None:
    """Say it and exit. What a message has beyond its first line (the end of a log) stands before the error."""
    first, *more = message.splitlines() or [""]
    for line in more:
        print(line, file=sys.stderr)
    print(f"error: {code}: {first}", file=sys.stderr)
    if wants_json(words):
        with contextlib.suppress(OSError):  # the disk that is full, or the reader that is gone, may be the error
            print(json.dumps({"error": {"code": code, "message": message}}), flush=True)
    _let_go_of_stdout()
    sys.exit(exit_code)


def _let_go_of_stdout() -> None:
    """What cannot be written goes nowhere: else the interpreter tries once more at its end and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def wants_json(words: Sequence[str]) -> bool:
    """Whether these words of a command line ask for JSON; they may be wrong otherwise."""
    options = words[: words.index("--")] if "--" in words else words
    return any(word in _JSON_OPTIONS for word in options)
