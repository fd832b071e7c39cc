"""The options of `generate` that say how tokens are drawn, and what they become in a request.

Not here: defaults and exact limits of the server; an option that is not given is not sent. Invariant: every sampling
field of `serve.proto` has one option of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from coordinator.cli.values import Parsed
from coordinator.errors import BadOption
from laneproto.v1 import serve_pb2

_F = TypeVar("_F", bound=Callable[..., Any])


def parse_ids(text: str) -> list[int]:
    """Token ids from "1,2,3"."""
    try:
        ids = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise BadOption(f"{text!r}: expected numbers such as 1,2,3") from None
    if any(not 0 <= token_id < 1 << 32 for token_id in ids):
        raise BadOption("a token id is a number from 0 to 4294967295")
    return ids


def parse_bias(text: str) -> tuple[int, float]:
    """A token id and its bias from "17=-2.5"."""
    token, _, bias = text.partition("=")
    try:
        (token_id,) = parse_ids(token)
        return token_id, float(bias)
    except (ValueError, BadOption):
        raise BadOption(f"{text!r}: expected a token id and a number such as 17=-2.5") from None


IDS = Parsed("ids", parse_ids)
BIAS = Parsed("bias", parse_bias)

_OPTIONS = (
    click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=click.IntRange(0, 2**32 - 1), metavar="K", help="Draw from the K likeliest; 0: all."),
    click.option("--top-p", type=click.FloatRange(0, 1), help="Draw from the likeliest tokens of this mass."),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Draw from tokens this likely, beside the likeliest."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Default: chosen by the server and reported."),
    click.option(
        "--repetition-penalty", type=click.FloatRange(0.01, 100), help="Of tokens in prompt or output; over 1: fewer."
    ),
    click.option("--presence-penalty", type=click.FloatRange(-2, 2), help="Of tokens in the output; over 0: fewer."),
    click.option("--frequency-penalty", type=click.FloatRange(-2, 2), help="The same, for every time."),
    click.option(
        "--logit-bias",
        "logit_biases",
        type=BIAS,
        multiple=True,
        metavar="ID=BIAS",
        help="-100 to 100; may be repeated.",
    ),
    click.option(
        "--min-tokens", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Nothing ends the answer before."
    ),
    click.option("--ignore-eos", is_flag=True, help="The model's own end does not end the answer."),
    click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    click.option(
        "--stop-ids", type=IDS, metavar="1,2,3", help="Token ids that end the answer, beside the model's own."
    ),
)


def sampling_options(command: _F) -> _F:
    """Adds them all; `fill` takes what they give."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fill(
    request: serve_pb2.GenerateRequest,
    *,
    logit_biases: tuple[tuple[int, float], ...],
    ignore_eos: bool,
    stops: tuple[str, ...],
    stop_ids: list[int] | None,
    **plain: float | None,
) -> None:
    """Puts what was given into the request."""
    for name, value in plain.items():
        if value is not None:
            setattr(request, name, value)
    for token, bias in logit_biases:
        request.logit_bias[token] = bias
    if ignore_eos:
        request.ignore_eos = True
    request.stop.extend(stops)
    request.stop_ids.extend(stop_ids or ())
