"""`python -m shared_experts …`: one command table, nothing else.

Each command lives in its own module and is imported when it is asked for, so `own` pays nothing for the converter.
Invariant: exit code 0 done, 1 refused (one line `error: CODE: reason` on stderr), 2 wrong usage.
"""

from __future__ import annotations

import importlib
import sys

import click

from shared_experts.errors import SharedExpertsError

COMMANDS = {
    "inspect": "shared_experts.cli_pack",
    "own": "shared_experts.cli_own",
    "pack": "shared_experts.cli_pack",
    "verify": "shared_experts.cli_pack",
}


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
        except KeyboardInterrupt:
            raise click.Abort from None  # click itself would print an empty line first


@click.command(cls=_Commands)
def commands() -> None:
    """Expert weights at rest and in host memory: packs and the shared region."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    try:
        result = commands.main(args=arguments, prog_name="python -m shared_experts", standalone_mode=False)
    except click.exceptions.Abort:
        print("error: interrupted: stopped by the user", file=sys.stderr)
        return 1
    except click.UsageError as error:
        print(f"error: usage: {error.format_message()}", file=sys.stderr)
        return 2
    except SharedExpertsError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: io: {error}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
