"""`python -m shared_experts …`: one command table, nothing else.

Each command lives in its own module and is imported when it is asked for, so `own` pays nothing for the converter.
Invariant: exit code 0 done, 1 refused, 2 wrong usage, 128 + N stopped by signal N; what failed is one line
`error: CODE: reason` on stderr and, with `--json`, one object on stdout.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys

import click

from shared_experts.errors import SharedExpertsError

COMMANDS = {
    "inspect": "shared_experts.cli_pack",
    "own": "shared_experts.cli_own",
    "pack": "shared_experts.cli_pack",
    "verify": "shared_experts.cli_pack",
}


class _Stopped(Exception):
    """By a signal."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number = number


class _Commands(click.Group):
    """A click group whose commands are attributes of lazily imported modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:  # click itself would print an empty line first
            raise _Stopped(*stopped.args) from None


@click.command(cls=_Commands)
def commands() -> None:
    """Expert weights at rest and in host memory: packs and the shared region."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result = commands.main(args=words, prog_name="python -m shared_experts", standalone_mode=False)
    except _Stopped as stopped:
        return _fail(words, "interrupted", "stopped by the user", 128 + stopped.number)
    except click.Abort:  # before the command had begun
        return _fail(words, "interrupted", "stopped by the user", 128 + signal.SIGINT)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _fail(words, "usage", "a command is missing", 2)
    except click.UsageError as error:
        return _fail(words, "usage", " ".join(error.format_message().split()), 2)
    except SharedExpertsError as error:
        return _fail(words, error.code, str(error), 1)
    except OSError as error:
        return _fail(words, "io", str(error), 1)
    return result if isinstance(result, int) else 0


def _fail(words: list[str], code: str, message: str, exit_code: int) -> int:
    print(f"error: {code}: {message}", file=sys.stderr)
    options = words[: words.index("--")] if "--" in words else words
    if "--json" in options:
        print(json.dumps({"error": {"code": code, "message": message}}))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
