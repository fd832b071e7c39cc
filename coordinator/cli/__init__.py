"""`expressway`: one command per file of this package.

Not here: what the commands do. Invariant: exit code 0 done, 1 refused or failed (one line `error: CODE: reason` on
stderr), 2 wrong usage; whatever a command prints for programs goes to stdout, everything for people to stderr.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from coordinator.errors import CoordinatorError

COMMANDS = ("pack", "inspect", "verify", "serve", "generate", "status", "doctor")


class _Commands(click.Group):
    """Commands by name, each imported when it is asked for: `expressway pack --help` does not load gRPC."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"coordinator.cli.{cmd_name}").command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="expressway", prog_name="expressway")
def commands() -> None:
    """Serve mixture-of-experts models that do not fit in GPU memory, to several agents at once."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "ERROR"
    )  # before gRPC is loaded: its notes on closed connections help nobody
    try:
        result = commands.main(args=arguments, prog_name="expressway", standalone_mode=False)
    except click.exceptions.Abort:
        print("error: interrupted: stopped by the user", file=sys.stderr)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CoordinatorError as error:
        print(f"error: {error.code}: {error.message}", file=sys.stderr)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)
