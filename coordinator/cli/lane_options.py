"""The options of commands that start lanes: `serve`, and `generate` with a pack.

Not here: what they mean (coordinator.host.lane_options, lanes). Invariant: both commands know the same ones, checked
alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from coordinator.cli.values import CHUNK, CONTEXT, SIZE
from coordinator.config import DEFAULT_CPU_BUDGET
from coordinator.host.lane_options import LaneOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
    click.option("--vram-budget", "vram_budget_bytes", type=SIZE, metavar="SIZE",
                 help="cuda: all memory of its GPU that a lane may take, such as 16GiB. cpu: host memory of each "
                      f"lane's expert cache; {DEFAULT_CPU_BUDGET} unless said."),
    click.option("--context", "context_tokens", type=CONTEXT, metavar="N",
                 help="Prompt and answer tokens. Default: the model's."),
    click.option("--prefill-chunk", "prefill_chunk_tokens", type=CHUNK, metavar="N",
                 help="Prompt tokens a pass. Default: the lane's."),
    click.option("--prefill-routing", type=click.Choice(["exact", "vram"]),
                 help="vram: approximate; while a prompt is read, tokens choose among the experts in the lane's cache. "
                      "Default: exact."),
    click.option("--state-budget", "state_budget_bytes", type=SIZE, metavar="SIZE",
                 help="Of each lane, for conversations that wait for their next turn. Default: the lane's."),
    click.option("--ngram-cache", "ngram_cache_bytes", type=SIZE, metavar="SIZE",
                 help="Of each lane, for rows of n-gram tables. Default: the lane's."),
    click.option("--kv", type=click.Choice(["exact", "int8"]),
                 help="How keys and values of tokens are kept. int8 takes half of bf16's memory, a quarter of fp32's, "
                      "and is approximate: every answer says so. Default: exact."),
    click.option("--drafts", type=click.IntRange(0, 3), metavar="N",
                 help="Tokens guessed ahead of a pass, at most. Default: 3 where the pack has a draft layer; 0: none."),
    click.option("--draft-vocab", "draft_vocabulary", metavar="FILE",
                 type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
                 help="The ids that a draft layer may name (see draft-vocab). Default: all."),
    click.option("--trace-routing", "trace_folder", metavar="DIR",
                 type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True, resolve_path=True),
                 help="Every lane writes a file there that says which experts its windows used; never tokens."),
)  # fmt: skip

LANE_OPTIONS = (
    "device",
    "vram_budget_bytes",
    "context_tokens",
    "prefill_chunk_tokens",
    "prefill_routing",
    "state_budget_bytes",
    "ngram_cache_bytes",
    "kv",
    "drafts",
    "draft_vocabulary",
    "trace_folder",
)


def lane_options(command: Command) -> Command:
    """Adds the options to a command; `collect` takes what they were given."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_here(context: click.Context) -> str | None:
    """The first of them that the command line itself has."""
    for name in LANE_OPTIONS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            return next(param.opts[0] for param in context.command.params if param.name == name)
    return None


def collect(pack: Path, *, log_json: bool, **given: Any) -> LaneOptions:
    """The value of the options of one command line."""
    return LaneOptions(pack, log_json=log_json, **given)
