"""A simulated lane: a real gRPC server that speaks lane.proto and makes its tokens up. No torch.

In a test's own loop (`async with FakeLane(path) as lane`), or as a process of its own, so that it can be killed:

    python -m tests.fakes.lane --listen unix:/run/lane-0.sock --name lane-0 [--fault crash --fault-after 5] ...

Tokens: token i of a request is `token_at(prompt_ids, i)`, or `Script.tokens[i]` where a script is given; the request
ends with STOP at a stop id, else with LENGTH; a replay goes on after its replayed tokens. `Script` also says where it
crashes, hangs, is slow or fails.

Invariant: whatever the script, at most one generation runs and its stream has at most one Finished event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from laneproto.v1 import lane_pb2 as pb
from laneproto.v1 import lane_pb2_grpc as rpc

FAULTS = ("none", "crash", "hang", "stick", "break", "error", "refuse")


def token_at(prompt_ids: Sequence[int], index: int, vocab_size: int = 256) -> int:
    """The made-up token `index` of an answer to `prompt_ids`: the same on every lane, and never below 3."""
    return 3 + (sum(prompt_ids) * 31 + len(prompt_ids) * 7 + index * 13) % (vocab_size - 3)


@dataclass(frozen=True, slots=True)
class Script:
    """How the lane behaves. Faults strike when `fault_after` tokens of a generation were sent.

    crash: the process is killed (a lane in the test's loop drops its connections instead).
    hang: no further event, Cancel is answered but nothing stops, Watch falls silent.
    stick: like hang, but Watch goes on and shows a step that stands still.
    break: the stream ends with gRPC INTERNAL, without Finished.
    error: Finished(ERROR) with `error_code`.
    refuse: every Generate is refused before Accepted with `refuse_status` and `error_code`.
    """

    tokens: tuple[int, ...] | None = None  # ends after these with LENGTH
    token_delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    chunk_tokens: int = 1  # tokens per event
    fault: str = "none"
    fault_after: int = 0
    error_code: str = "non_finite_logits"
    refuse_status: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED
    hello_delay_s: float = 0.0
    ignore_cancel: bool = False


@dataclass
class _Run:
    request_id: str
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class FakeLane(rpc.LaneServicer):
    """One simulated lane. `requests` keeps every GenerateRequest it saw, `ended` (request_id, reason) pairs."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "lane-0",
        script: Script | None = None,
        vocab_size: int = 256,
        context_tokens: int = 4096,
        eos_ids: Sequence[int] = (2,),
        fingerprint: bytes = b"\x07" * 32,
        model_name: str = "fake",
        die: bool = False,
    ) -> None:
        self.path = Path(path)
        self.name = name
        self.script = script or Script()
        self.incarnation = os.urandom(16)
        self.model = pb.ModelInfo(
            name=model_name, architecture="fake", fingerprint=fingerprint, vocab_size=vocab_size,
            context_tokens=context_tokens, eos_ids=eos_ids, expert_format="f32", region_bytes=1 << 20,
            max_output_tokens=context_tokens,
        )  # fmt: skip
        self.counters = pb.Counters(cache_budget_bytes=1 << 20)
        self.requests: list[pb.GenerateRequest] = []
        self.ended: list[tuple[str, int]] = []
        self.prefixes: dict[tuple[bytes, int], int] = {}  # (chain, tokens) -> place; change it with `tell_prefix`
        self._prefix_news: list[pb.PrefixEvent] = []
        self._state = pb.LANE_STATE_READY
        self._run: _Run | None = None
        self._hung = self._stuck = False
        self._stuck_ns = 0
        self._die = die
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._drained = asyncio.Event()

    @property
    def address(self) -> str:
        """The gRPC address of this lane."""
        return f"unix:{self.path}"

    @property
    def busy(self) -> bool:
        """Whether a generation is running."""
        return self._run is not None

    async def start(self) -> FakeLane:
        """Listens on the socket."""
        self.path.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        rpc.add_LaneServicer_to_server(self, self._server)
        checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        self.path.chmod(0o600)
        return self

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops listening; with no grace, running streams break as they do when a lane dies."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)
        self.path.unlink(missing_ok=True)

    crash = stop

    async def restart(self, script: Script | None = None) -> None:
        """A new process in the coordinator's eyes: new incarnation, counters at zero."""
        await self.stop()
        self.incarnation = os.urandom(16)
        self.counters = pb.Counters(cache_budget_bytes=1 << 20)
        self._run, self._hung, self._stuck, self._state = None, False, False, pb.LANE_STATE_READY
        self._drained.clear()
        self.script = script or self.script
        await self.start()

    async def __aenter__(self) -> FakeLane:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_drained(self) -> None:
        """Returns when Drain was asked for and nothing runs."""
        await self._drained.wait()

    def script_next(self, **changes: object) -> None:
        """Changes the script for generations that begin after this call."""
        self.script = replace(self.script, **changes)  # type: ignore[arg-type]

    def status(self) -> pb.LaneStatus:
        """The status that Watch sends."""
        return pb.LaneStatus(
            state=self._state,
            counters=self.counters,
            active_request_id=self._run.request_id if self._run else "",
            stamp_ns=time.monotonic_ns(),
            step=self._step(),
        )

    def _step(self) -> pb.RunningStep | None:
        if self._run is None:
            return None
        at = self._stuck_ns if self._stuck else time.monotonic_ns()
        return pb.RunningStep(kind=pb.STEP_KIND_DECODE, started_ns=at, progress_ns=at, p99_ns=1_000_000)

    def _announce(self) -> None:
        if self._run is not None:
            self._state = pb.LANE_STATE_DRAINING if self._state == pb.LANE_STATE_DRAINING else pb.LANE_STATE_BUSY
        elif self._state != pb.LANE_STATE_DRAINING:
            self._state = pb.LANE_STATE_READY
        else:
            self._drained.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def Hello(self, request, context):
        await asyncio.sleep(self.script.hello_delay_s)
        if request.protocol_version != 1:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "bad_protocol_version", "speak version 1")
        return pb.HelloReply(
            protocol_version=1, lane=self.name, incarnation=self.incarnation, pid=os.getpid(), device="cpu",
            model=self.model, status=self.status(),
        )  # fmt: skip

    async def Watch(self, request, context):
        while True:
            changed = self._changed
            if not self._hung:
                yield self.status()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), 0.5)

    async def Cancel(self, request, context):
        run = self._run
        if run is None or run.request_id != request.request_id:
            return pb.CancelReply(found=False)
        if not self.script.ignore_cancel:
            run.cancelled.set()
        return pb.CancelReply(found=True)

    async def Drain(self, request, context):
        self._state = pb.LANE_STATE_DRAINING
        self._announce()
        return pb.DrainReply()

    def tell_prefix(self, chain: bytes, tokens: int, place: int | None) -> None:
        """A prefix is there now, at that place; or no more (None)."""
        prefix = pb.Prefix(chain=chain, tokens=tokens, place=place or 0)
        event = pb.PrefixEvent(sequence=len(self._prefix_news) + 1)
        if place is None:
            self.prefixes.pop((chain, tokens), None)
            event.removed.append(prefix)
        else:
            self.prefixes[chain, tokens] = place
            event.added.append(prefix)
        self._prefix_news.append(event)
        self._announce()

    async def Prefixes(self, request, context):
        seen = len(self._prefix_news)
        held = [pb.Prefix(chain=c, tokens=n, place=place) for (c, n), place in self.prefixes.items()]
        yield pb.PrefixEvent(sequence=seen, snapshot=True, complete=True, added=held)
        while True:
            changed = self._changed
            for event in self._prefix_news[seen:]:
                yield event
            seen = len(self._prefix_news)
            await changed.wait()

    async def Generate(self, request, context):
        self.requests.append(request)
        script = self.script
        if script.fault == "refuse":
            await _refuse(context, script.refuse_status, script.error_code, "scripted refusal")
        if self._state == pb.LANE_STATE_DRAINING:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "draining", "the lane is draining")
        if self._run is not None:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", "a generation is running")
        if not request.prompt_ids or max(request.prompt_ids) >= self.model.vocab_size:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "bad_prompt", "empty or out of range")
        run = self._run = _Run(request.request_id)
        self.counters.requests += 1
        self._announce()
        reason = pb.FINISH_REASON_CANCELLED  # what a lost connection counts as
        try:
            yield pb.GenerateEvent(accepted=pb.Accepted(stamp_ns=time.monotonic_ns()))
            reason, sent = pb.FINISH_REASON_LENGTH, 0
            await _pause(run, script.prefill_delay_s)
            self.counters.prompt_tokens += len(request.prompt_ids)
            replayed = request.replayed_tokens
            prompt_ids = request.prompt_ids[: len(request.prompt_ids) - replayed]
            count = min(request.max_tokens, self.model.context_tokens - len(prompt_ids))
            if script.tokens is not None:
                count = min(count, len(script.tokens))
            count -= replayed
            chunk = pb.TokenChunk()
            while True:
                if script.fault != "none" and sent == script.fault_after:
                    await self._strike(script, context)
                    reason = pb.FINISH_REASON_ERROR
                    break
                if sent >= count:
                    break
                await _pause(run, script.token_delay_s)
                if run.cancelled.is_set():
                    reason = pb.FINISH_REASON_CANCELLED
                    break
                token = script.tokens[replayed + sent] if script.tokens else token_at(
                    prompt_ids, replayed + sent, self.model.vocab_size
                )  # fmt: skip
                chunk.tokens.append(self._token(request, token))
                sent += 1
                self.counters.generated_tokens += 1
                self.counters.windows += 1
                stop = token in request.stop_ids
                if len(chunk.tokens) >= script.chunk_tokens or stop or sent >= count or sent == script.fault_after:
                    yield pb.GenerateEvent(tokens=chunk)
                    chunk = pb.TokenChunk()
                if stop:
                    reason = pb.FINISH_REASON_STOP
                    break
            if chunk.tokens:
                yield pb.GenerateEvent(tokens=chunk)
            failed = reason == pb.FINISH_REASON_ERROR
            self.counters.failed += failed
            self.counters.cancelled += reason == pb.FINISH_REASON_CANCELLED
            yield pb.GenerateEvent(
                finished=pb.Finished(
                    reason=reason,
                    usage=pb.Usage(prompt_tokens=len(prompt_ids), completion_tokens=replayed + sent),
                    counters=pb.Counters(generated_tokens=sent, prompt_tokens=len(request.prompt_ids)),
                    error_code=script.error_code if failed else "",
                    error_message="scripted" if failed else "",
                )
            )
        finally:
            self.ended.append((request.request_id, reason))
            if not (self._hung or self._stuck):
                self._run = None
                self._announce()

    def _token(self, request, token: int) -> pb.Token:
        made = pb.Token(id=token, stamp_ns=time.monotonic_ns())
        if request.logprobs:
            made.logprob = -0.5
            made.top.extend(
                pb.TokenLogprob(id=(token + k) % self.model.vocab_size, logprob=-0.5 - k)
                for k in range(request.top_logprobs)
            )
        return made

    async def _strike(self, script: Script, context) -> None:
        if script.fault == "crash":
            if self._die:
                os.kill(os.getpid(), signal.SIGKILL)
            # What a killed process wrote still arrives; what a stopped server of this loop wrote, only if it was read.
            await asyncio.sleep(0.2)
            self._dying = asyncio.create_task(self.stop())
            await asyncio.sleep(3600)
        elif script.fault == "hang":
            self._hung = True
            await asyncio.sleep(3600)
        elif script.fault == "stick":
            self._stuck, self._stuck_ns = True, time.monotonic_ns()
            await asyncio.sleep(3600)
        elif script.fault == "break":
            await context.abort(grpc.StatusCode.INTERNAL, "scripted break")


async def _pause(run: _Run, seconds: float) -> None:
    """Sleeps, or less when the run is cancelled; always yields to the loop."""
    await asyncio.sleep(0)
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.cancelled.wait(), seconds)


async def _refuse(context, status: grpc.StatusCode, code: str, message: str) -> None:
    await context.abort(status, message, trailing_metadata=(("expressway-error-code", code),))


async def _main(options: argparse.Namespace) -> None:
    script = Script(
        token_delay_s=options.token_delay_s,
        prefill_delay_s=options.prefill_delay_s,
        fault=options.fault,
        fault_after=options.fault_after,
        tokens=None if options.token is None else (options.token,) * 4096,
    )
    await asyncio.sleep(options.start_delay_s)
    if options.exit_code is not None:
        sys.exit(options.exit_code)
    lane = FakeLane(
        options.listen.removeprefix("unix:"), name=options.name, script=script, die=True, vocab_size=options.vocab
    )
    await lane.start()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    waiting = [asyncio.create_task(ended.wait()), asyncio.create_task(lane.wait_drained())]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await lane.stop(1.0)


def main() -> None:
    """Runs one simulated lane; unknown options (a real lane's) are ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--name", default="lane-0")
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    parser.add_argument("--token", type=int, help="each of an answer's, instead of made up ones")
    parser.add_argument("--prefill-delay-s", type=float, default=0.0)
    parser.add_argument("--start-delay-s", type=float, default=0.0)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--exit-code", type=int)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-after", type=int, default=0)
    asyncio.run(_main(parser.parse_known_args()[0]))


if __name__ == "__main__":
    main()
