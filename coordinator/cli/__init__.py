"""`expressway`: one command per file of this package.

Not here: what the commands do. Invariant: exit code 0 done, 1 refused or failed, 2 wrong usage (`failure` says how both
are told), 128 + N stopped by signal N before it was done; whatever a command prints for programs goes to stdout,
everything for people to stderr.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys

import click

from coordinator.cli.failure import fail
from coordinator.errors import CoordinatorError, Interrupted

COMMANDS = (
    "pack", "inspect", "verify", "plan", "serve", "generate", "status", "top", "lane", "keys", "cluster", "doctor",
    "draft-vocab", "bench",
)  # fmt: skip


class _Commands(click.Group):
    """Commands by name, each imported when it is asked for: `expressway pack --help` does not load gRPC."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"coordinator.cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else "`expressway --help` lists them"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click itself would print an empty line first
            raise Interrupted("stopped by the user", signal.SIGINT) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="expressway", prog_name="expressway")
def commands() -> None:
    """Serve mixture-of-experts models that do not fit in GPU memory, to several agents at once."""


def _open_standard_files() -> None:
    """Those that the caller closed: else the next file or socket has their number, and what is printed goes there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least free number is this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  for as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "ERROR"
    )  # before gRPC is loaded: its notes on closed connections help nobody
    words = sys.argv[1:] if arguments is None else arguments
    _open_standard_files()
    try:
        result = commands.main(args=words, prog_name="expressway", standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk or a reader that is gone is still an error with a code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        fail(words, "usage", "a command is missing", 2)
    except click.ClickException as error:
        fail(words, "usage", " ".join(error.format_message().split()), 2)
    except Interrupted as error:
        fail(words, error.code, error.message, 128 + error.signal_number)
    except click.Abort:  # before the command had begun
        fail(words, "interrupted", "stopped by the user", 128 + signal.SIGINT)
    except CoordinatorError as error:
        fail(words, error.code, error.message, 1)
    except OSError as error:
        fail(words, "io", str(error), 1)
    sys.exit(result if isinstance(result, int) else 0)
