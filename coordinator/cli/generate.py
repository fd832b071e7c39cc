"""`expressway generate`: one question, one answer; of a pack (processes of its own) or of a running server.

Not here: serving. Invariant: stdout carries the answer alone: its text as it comes, or with `--json` one object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from coordinator.channel import Trust
from coordinator.cli.answer import Collected, ask
from coordinator.cli.lane_options import LANE_OPTIONS, collect, given_here, lane_options
from coordinator.cli.progress import Progress
from coordinator.cli.sampling_options import IDS, fill, sampling_options
from coordinator.config import check_pack, lane_budget
from coordinator.errors import EmptyPrompt, Interrupted
from coordinator.host.lane_options import LaneOptions
from coordinator.host.solo import solo
from coordinator.logs import configure_logging
from coordinator.pack_facts import read_facts
from laneproto.v1 import serve_pb2


@click.command(short_help="Answer one prompt with PACK or with a running server.")
@click.argument("pack", required=False, type=click.Path(path_type=Path))
@click.option("--address", metavar="ADDR", help="A running server's gRPC door: HOST:PORT or unix:PATH.")
@click.option("--tls", is_flag=True, help="That door speaks TLS.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The same, with these certificates (PEM) to trust in place of the system's.",
)
@click.option("--prompt", metavar="TEXT", help="Plain text.")
@click.option("--prompt-ids", type=IDS, metavar="1,2,3", help="Token ids.")
@click.option("--chat", is_flag=True, help="The prompt is a user's turn in the model's chat format.")
@click.option("--max-tokens", type=click.IntRange(1, 2**31 - 1), default=256, show_default=True, metavar="N")
@sampling_options
@click.option("--logprobs", type=click.IntRange(0, 20), metavar="K", help="Log-probabilities, with K alternatives.")
@click.option("--session", default="", metavar="ID", help="Keeps a conversation on one lane.")
@lane_options
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=3600.0, show_default=True, metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end.")
def command(
    pack: Path | None,
    address: str | None,
    tls: bool,
    tls_ca: Path | None,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: bool,
    max_tokens: int,
    logprobs: int | None,
    session: str,
    timeout_s: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Answer one prompt with PACK (starts an owner and a lane for it), or with the server at --address."""
    if (pack is None) == (address is None):
        raise click.UsageError("give either PACK or --address")
    if address is not None and (option := given_here(click.get_current_context())):
        raise click.UsageError(f"{option} is for the lane of a PACK; a server's lanes have theirs already")
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("give either --prompt or --prompt-ids")
    if not (prompt or prompt_ids or chat):
        raise EmptyPrompt("the prompt has no tokens")
    if chat and prompt is None:
        raise click.UsageError("--chat needs --prompt")
    if (tls or tls_ca) and address is None:
        raise click.UsageError("--tls and --tls-ca are for a server at --address")
    configure_logging(json_lines=False, process="generate", level="error")
    request = serve_pb2.GenerateRequest(max_tokens=max_tokens, session=session)
    lane = {name: given.pop(name) for name in LANE_OPTIONS}
    fill(request, **given)
    if chat:
        request.chat.messages.add(role="user", content=prompt)
        request.chat.reasoning_effort = "none"
    elif prompt is not None:
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt_ids or ())
    if logprobs is not None:
        request.logprobs = logprobs
    if address is not None:
        trust = Trust(tls_ca) if tls or tls_ca else None
        answer = asyncio.run(ask(address, request, _shown(as_json), timeout_s=timeout_s, tls=trust))
    else:
        assert pack is not None
        lane["vram_budget_bytes"] = lane_budget(lane["device"], lane["vram_budget_bytes"])
        options = collect(check_pack(pack), log_json=False, **lane)
        _check_fits(options, prompt_ids)
        progress = Progress()
        try:
            answer = asyncio.run(_ask_pack(options, request, progress, as_json=as_json, timeout_s=timeout_s))
        except asyncio.CancelledError:  # everything is stopped and removed by now
            raise Interrupted("stopped by the user", signal.SIGTERM) from None
        finally:
            progress.end()  # an error stands on a line of its own
    print(json.dumps(answer.to_json()) if as_json else "", flush=True)


def _check_fits(options: LaneOptions, prompt_ids: list[int] | None) -> None:
    """Refuses what could not work, before any process is started."""
    facts = read_facts(options.pack)
    facts.check_context(options.context_tokens)
    if prompt_ids is not None:
        facts.check_prompt(prompt_ids, options.context_tokens)
    if warning := facts.cache_warning(options.vram_budget_bytes):
        print(f"warning: {warning}", file=sys.stderr)


async def _ask_pack(
    options: LaneOptions,
    request: serve_pb2.GenerateRequest,
    progress: Progress,
    *,
    as_json: bool,
    timeout_s: float,
) -> Collected:
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with solo(options, dict(os.environ), timeout_s, progress.show) as lane:
        progress.end()
        answering = asyncio.create_task(ask(lane.target, request, _shown(as_json), timeout_s=timeout_s))
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()  # nobody takes it any more when this task is the one that was cancelled
        if answering.exception() is not None:
            lane.check()  # a process that died says more than the broken stream
        return answering.result()


def _shown(as_json: bool) -> Callable[[str], None]:
    def show(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    return show
