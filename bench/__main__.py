"""`python -m bench`, which is `expressway bench`: load over a server's public door, reports, comparisons.

Not here: what is done (bench.load). Invariant: stdout carries the report (Markdown, or JSON with `--json`) and nothing
else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.aligned import Rules
from bench.load import markdown
from bench.load.compare import Unlike, compare
from bench.load.door import Server, served_model
from bench.load.drive import Work
from bench.load.figures import Goals
from bench.load.runs import FORMAT, SCENARIOS, Asked, run
from bench.load.token_door import TokenServer
from bench.load.walked import follower, scripts_along, walk_of
from bench.load.workloads import WORKLOADS, digest
from bench.result import frame
from bench.synthetic.shape import SHAPES

REPORT_BYTES = 1 << 28
KEY_VARIABLE = "EXPRESSWAY_API_KEY"
_PAIR = re.compile(r"\[\s+([\d.e-]+),\s+([\d.e-]+)\s+\]")  # an arrival takes a line, not four
PLOTS_MISSING = "plots need matplotlib: pip install 'expressway[bench]'"


class Failed(click.ClickException):
    """It cannot be done; a stable code and the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions of click
    """Whole numbers from 1 to 1024, with commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click calls it."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= 1024 for p in parts if len(p) < 5) or any(
            not 0 < len(p) < 5 for p in parts
        ):
            self.fail(f"{value!r}: expected numbers from 1 to 1024 such as 1,2,4", param, ctx)
        return tuple(map(int, parts))


class Durations(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions of click
    """Seconds from 1 to 86400: one for all runs, or one for each with commas."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click calls it."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            found = ()
        if not found or not all(1 <= each <= 86400 for each in found):
            self.fail(f"{value!r}: expected seconds from 1 to 86400 such as 75 or 40,75", param, ctx)
        return found


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Measure a running server over its public door, show a measurement, and compare two."""


@main.command("run")
@click.option("--url", metavar="URL",
              help="Of an OpenAI-compatible server, with its /v1. `expressway bench run` fills it in.")  # fmt: skip
@click.option("--grpc", metavar="HOST:PORT|unix:PATH",
              help="With --walk, instead of --url: the gRPC door. `expressway bench run` fills it in.")  # fmt: skip
@click.option("--walk", type=click.Choice(list(SHAPES)),
              help="Ask in token ids along the walk of this synthetic model (`python -m bench.synthetic`), and check "
                   "that answers follow it.")  # fmt: skip
@click.option("--model", metavar="NAME", help="Default: the first that the server lists.")
@click.option("--key-variable", default=KEY_VARIABLE, show_default=True, metavar="NAME",
              help="The environment variable that holds the server's key, where there are keys.")  # fmt: skip
@click.option("--scenario", type=click.Choice(SCENARIOS), default="closed", show_default=True)
@click.option("--workload", type=click.Choice(sorted(WORKLOADS)), default="code", show_default=True)
@click.option("--concurrency", type=Numbers(), default="1,2", show_default=True, metavar="N,…",
              help="closed: agents, a run for each. interference: most others beside the victim.")  # fmt: skip
@click.option("--seconds", type=Durations(), default="75", show_default=True, metavar="SECONDS,…",
              help="Of each run; one for all, or one for each of --concurrency.")  # fmt: skip
@click.option("--rate", "rate_per_s", type=click.FloatRange(0.001, 1000), default=0.2, show_default=True,
              help="open: conversations that begin, a second.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000), default=6, show_default=True,
              help="interference, long-short.")  # fmt: skip
@click.option("--scale", type=click.FloatRange(0.001, 10), default=1.0, show_default=True,
              help="Of all token counts and pauses.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=1, show_default=True)
@click.option("--nonce", metavar="WORD", help="Begins every system prompt. Default: a new one, so prompts are cold.")
@click.option("--warm-up", "warm_up_s", type=click.FloatRange(0, 3600), default=5.0, show_default=True,
              help="Seconds after a lane's first token that do not count.")  # fmt: skip
@click.option("--window", "min_window_s", type=Durations(), default="60", show_default=True, metavar="SECONDS,…",
              help="Least common window; 10 where a minute is too long. One for all, or one for each run.")  # fmt: skip
@click.option(
    "--goal-ttft", type=click.FloatRange(0.001), default=10.0, show_default=True, help="Seconds, for goodput."
)
@click.option("--goal-gap", type=click.FloatRange(0.001), default=0.2, show_default=True, help="Seconds, for goodput.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(1), default=3600.0, show_default=True, help="Of a request."
)
@click.option("--fixed-length/--model-length", default=True, show_default=True,
              help="Whether answers go on past the model's own end (`ignore_eos`).")  # fmt: skip
@click.option("--note", default="", help="Kept in the report: which server, which settings.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="The report as JSON.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Plots; needs the extra `bench`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of Markdown.")
def run_command(**given: Any) -> None:
    """Drive load and print a report."""
    if given["plots"] is not None:
        _plots_or_exit()
    if (given["url"] is None) == (given["grpc"] is None) or (given["walk"] is None) != (given["grpc"] is None):
        raise click.UsageError("one of --url, or --grpc with --walk, is needed")
    for option, name in (("--seconds", "seconds"), ("--window", "min_window_s")):
        if len(given[name]) not in (1, len(given["concurrency"])):
            raise click.UsageError(f"{option}: one for all, or one for each of --concurrency")
    variable = given["key_variable"]
    if variable != KEY_VARIABLE and not os.environ.get(variable):
        raise click.UsageError(f"--key-variable: {variable} is not set")
    try:
        result = asyncio.run(_run(given, os.environ.get(variable)))
    except OSError as error:
        raise Failed("unreachable", str(error)) from None
    if given["out"]:
        given["out"].write_text(_PAIR.sub(r"[\1, \2]", json.dumps(result, indent=1)) + "\n")
    if given["plots"] is not None:
        _plot(result, given["plots"])
    print(json.dumps(result) if given["as_json"] else markdown.report(result), end="\n" if given["as_json"] else "")


async def _run(given: dict[str, Any], key: str | None) -> dict[str, Any]:
    nonce = given["nonce"] if given["nonce"] is not None else secrets.token_hex(4)
    server, told = await _server(given, key)
    work = Work(server, WORKLOADS[given["workload"]], given["scale"], given["seed"], nonce, given["timeout_s"])
    if given["walk"]:
        work = replace(work, scripts=scripts_along(walk_of(given["walk"])))
    asked = Asked(
        given["scenario"], given["concurrency"], given["seconds"], given["rate_per_s"], given["rounds"],
        tuple(Rules(warm_up_s=given["warm_up_s"], min_window_s=each) for each in given["min_window_s"]),
        Goals(given["goal_ttft"], given["goal_gap"]),
    )  # fmt: skip
    found = await run(work, asked, lambda text: print(text, file=sys.stderr))
    conditions = {
        name: given[name]
        for name in ("scenario", "workload", "scale", "seed", "rate_per_s", "rounds", "warm_up_s", "fixed_length",
                     "walk", "note")
    }  # fmt: skip
    conditions |= {
        name: given[name][0] if len(given[name]) == 1 else list(given[name]) for name in ("seconds", "min_window_s")
    }
    conditions |= {"format": FORMAT, "workload_digest": digest(), "concurrency": list(asked.concurrency)}
    pack = told.pop("pack", None)
    framed = frame("bench", _told(sys.argv[1:]), pack=pack or {}, conditions=conditions,
                   packages=("aiohttp", "expressway"))  # fmt: skip
    if pack is None:  # the server's: it says in `server` what it may say
        del framed["pack"]
    return {**framed, "server": {"url": server.url, "model": server.model, **told}, **found}


async def _server(given: dict[str, Any], key: str | None) -> tuple[Server | TokenServer, dict[str, Any]]:
    """Where to ask, and what it says of itself."""
    if given["walk"]:
        follow = follower(walk_of(given["walk"]))
        asked = TokenServer(given["grpc"], given["model"] or "", key, given["fixed_length"], follow)
        told = await asked.told()
        return replace(asked, model=given["model"] or told["model"]), {k: v for k, v in told.items() if k != "model"}
    server = Server(given["url"].rstrip("/"), given["model"] or "", key, given["fixed_length"])
    if not given["model"]:
        async with server.client() as session:
            server = replace(server, model=await served_model(session, server))
    return server, {}


def _told(words: list[str]) -> list[str]:
    """The command line without paths of this machine."""
    hidden = ("--out", "--plots")
    return [w for k, w in enumerate(words) if w not in hidden and (k == 0 or words[k - 1] not in hidden)]


def _plot(result: dict[str, Any], folder: Path) -> None:
    from bench.load.plots import write_plots

    folder.mkdir(parents=True, exist_ok=True)
    write_plots(result, folder)


@main.command("show", short_help="Print a report that was written with --out.")
@click.argument("report", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Plots; needs the extra `bench`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of Markdown.")
def show_command(report: Path, plots: Path | None, as_json: bool) -> None:
    """Print a report that was written with --out, on whichever machine, and draw its plots."""
    if plots is not None:
        _plots_or_exit()
    result = _read(report)
    try:
        text = markdown.report(result)
        if plots is not None:
            _plot(result, plots)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise Failed("bad_report", f"not a report of `bench run`: {error!r}") from None
    print(json.dumps(result) if as_json else text, end="\n" if as_json else "")


@main.command("compare")
@click.argument("a", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("b", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout instead of Markdown.")
def compare_command(a: Path, b: Path, as_json: bool) -> None:
    """Compare report B with report A: ratios over the same requests. Refuses runs that did not do the same work."""
    first, second = _read(a), _read(b)
    try:
        ratios = compare(first, second)
    except Unlike as unlike:
        raise Failed("unlike_runs", str(unlike)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise Failed("bad_report", f"not a report of `bench run`: {error!r}") from None
    if as_json:
        shown = {
            part: [
                {"measure": r.measure, "pairs": r.pairs, "ratio": r.ratio, "interval": [r.low, r.high]} for r in found
            ]
            for part, found in ratios.items()
        }
        print(json.dumps(shown))
    else:
        print(markdown.comparison(first["server"]["model"], second["server"]["model"], ratios), end="")


def _read(file: Path) -> dict[str, Any]:
    if file.stat().st_size > REPORT_BYTES:
        raise Failed("bad_report", f"{file}: over {REPORT_BYTES} bytes")
    try:
        said = json.loads(file.read_text())
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Failed("bad_report", f"{file}: not a report of `bench run`")
    return said


def _plots_or_exit() -> None:
    try:
        import matplotlib  # noqa: F401  only whether it is there
    except ImportError:
        raise Failed("no_matplotlib", PLOTS_MISSING) from None


def run_main(words: list[str]) -> int:
    """The exit code: 0 done, 1 failed, 2 wrong usage; the last line on stderr is `error: CODE: reason`."""
    try:
        main.main(args=words, prog_name="expressway bench", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        return _fail(words, "usage", error.format_message(), 2)
    except Failed as error:
        return _fail(words, error.code, error.format_message(), 1)
    except (click.Abort, KeyboardInterrupt):
        return _fail(words, "interrupted", "stopped by the user", 130)
    except OSError as error:
        return _fail(words, "io", str(error), 1)
    return 0


def _fail(words: list[str], code: str, message: str, exit_code: int) -> int:
    message = " ".join(message.split())
    print(f"error: {code}: {message}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": {"code": code, "message": message}}))
    return exit_code


if __name__ == "__main__":
    sys.exit(run_main(sys.argv[1:]))
