"""`python -m bench.parking --device cuda`: a state of the true shape is parked and taken back; no model runs.

    park        from the seat (a GPU's memory with --device cuda) into the host's park pool, in the lane's idle steps
    park_first  the first of all, into memory of the pool that nobody has used yet
    park_marked one with five checkpoints more, as reading a prompt of that length leaves
    again       the same after 300 tokens more: unchanged pages are not copied
    restore     out of the pool, digests checked; restore_and_take: until another lane may compute on it in its seat
    next        a conversation that nobody knows begins while another is in the seat, until it may compute there;
                next_said: until the lane's thread has said all that
    branch      one that goes on from an earlier checkpoint of what is in the seat, likewise
    checkpoint  until what computes next may overwrite the state; checkpoint_said: of the lane's thread
    leave, take the seat, where it makes room for another conversation and comes back
    copy        the same bytes between a GPU and host memory in one piece: what the link gives

Milliseconds are medians over --repeats; every state that comes back is compared to the bit. The pool's owner is a
thread of this process. Not here: what conversations read again, and real lanes (conversations).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import structlog
import torch

from bench import asked
from bench.result import frame, write
from bench.synthetic.shape import SHAPES
from lanes.counters import Counters
from lanes.device import cuda
from lanes.device.arena import Arena
from lanes.device.carrier import DeviceCarrier
from lanes.device.host import PinnedHost
from lanes.device.pool_pins import PoolPins
from lanes.device.registered import Registered
from lanes.device.side import Side
from lanes.device.staging import Staging, size_for
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.checkpoint import Checkpoint
from lanes.state.conversations import Conversations
from lanes.state.parking import Parking
from lanes.state.pool import StatePool
from lanes.state.seat import Seat
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from lanes.state.snapshot import Identity
from shared_experts.park_server import ParkServer

ADDED_TOKENS = 300
WARM = 3  # conversations that take memory which the others find


class Lane:
    """Its seat, conversations and pool."""

    def __init__(self, path: Path, shape: StateShape, tokens: int, device: str) -> None:
        self.counters = Counters()
        budget_bytes = 4 * shape.bytes(tokens)
        mine, pools = (Registered() if device == "cuda" else None for _ in range(2))
        self.arena = Arena(budget_bytes, mine)
        side = Side(torch.device(device))
        staging = Staging(side, size_for(shape))
        self.host = PinnedHost(self.arena, side, staging)
        self.seat = Seat(shape, tokens, device, self.host)
        pins = PoolPins(pools)
        self.carrier = DeviceCarrier(side, staging, pins, seat=self.seat.take, stays=self.arena.__contains__)
        identity = Identity.of(b"f" * 32, shape)
        self.park = Parking(path, identity, self.counters, clock=time.monotonic, carrier=self.carrier)
        states = StatePool(shape, budget_bytes, host=self.host, branch=self.seat.branch)
        self.held = Conversations(states, self.counters, self.park)
        self.park.ready()

    def read(self, prompt: Sequence[int], room: int, marks: Sequence[int] = ()) -> tuple[SequenceState, float]:
        """The conversation as if it had read the prompt, in its seat; and the milliseconds until what was known was."""
        began = time.perf_counter()
        begun = self.held.begin(prompt, room, b"")
        state, known = self.held.pool[begun.slot], begun.cached_tokens
        self.seat.take(state)
        _wait(self.seat.home)
        took_ms = (time.perf_counter() - began) * 1e3
        for end in (*marks, len(prompt)) if known + 1 < len(prompt) else ():
            state.reserve(len(prompt))
            for rows in state.rows(known, end):
                rows.normal_()
            for tensor in state.fixed():
                if tensor.is_floating_point():
                    tensor.normal_()
            state.length = end
            self.held.read(begun.slot, known, prompt[known:end])
            self.held.checkpoint(begun.slot)
            known = end
        self.held.end(begun.slot)
        return state, took_ms

    def turn_to(self, prompt: Sequence[int], room: int) -> dict[str, float]:
        """Milliseconds until a conversation that nobody knows may compute in the seat, and of this thread."""
        began = time.perf_counter()
        begun = self.held.begin(prompt, room, b"")
        self.seat.take(self.held.pool[begun.slot])
        said_ms = (time.perf_counter() - began) * 1e3
        _computed(self.seat.home)
        ready_ms = (time.perf_counter() - began) * 1e3
        self.held.end(begun.slot)
        return {"next": ready_ms, "next_said": said_ms}

    def branch(self, prompt: Sequence[int], room: int) -> dict[str, float]:
        """The same of a branch at a checkpoint of the conversation that is in the seat."""
        began = time.perf_counter()
        begun = self.held.begin(prompt, room, b"")
        self.seat.take(self.held.pool[begun.slot])
        _computed(self.seat.home)
        took_ms = (time.perf_counter() - began) * 1e3
        assert len(prompt) - begun.cached_tokens == 1, "no branch"
        self.held.end(begun.slot)
        return {"branch": took_ms}

    def checkpoint(self, state: SequenceState) -> dict[str, float]:
        """The same of a checkpoint."""
        _wait(self.seat.home)
        began = time.perf_counter()
        kept = Checkpoint.of(state)
        said_ms = (time.perf_counter() - began) * 1e3
        _computed(self.seat.home)
        ready_ms = (time.perf_counter() - began) * 1e3
        assert all(torch.equal(x.cpu(), y) for x, y in zip(state.fixed(), kept.tensors, strict=True))
        return {"checkpoint": ready_ms, "checkpoint_said": said_ms}

    def close(self) -> None:
        """Gives everything back."""
        self.park.close()
        self.carrier.close()
        self.arena.close()

    def settle(self) -> float:
        """Milliseconds of parking what waits."""
        before = self.counters.park_ns
        while self.held.idle():
            pass
        return (self.counters.park_ns - before) / 1e6


def _wait(state: SequenceState) -> None:
    if any(tensor.is_cuda for tensor in state.fixed()):
        torch.cuda.synchronize()


def _computed(home: SequenceState) -> None:
    """Until what computes may go on: copies beside it are not waited for."""
    if any(tensor.is_cuda for tensor in home.fixed()):
        torch.cuda.current_stream().synchronize()


def timed_ms(run: Callable[[], object], home: SequenceState) -> float:
    """Of one call, the device's part included."""
    _wait(home)
    began = time.perf_counter()
    run()
    _wait(home)
    return (time.perf_counter() - began) * 1e3


def equal(a: SequenceState, b: SequenceState, tokens: int) -> bool:
    """The rows of two states, wherever they lie, to the bit."""
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a.rows(0, tokens), b.rows(0, tokens), strict=True))


def once(a: Lane, b: Lane, tokens: int, first: int) -> dict[str, float]:
    """One conversation's way, of tokens that no other has; AssertionError where a bit was lost."""
    room, prompt = tokens + 2 * ADDED_TOKENS, [(first + n) % 50_000 for n in range(tokens)]
    restores, found = b.counters.restores, dict[str, float]()
    state, _ = a.read(prompt, room)
    found["park"] = a.settle()
    longer = [*prompt, *range(ADDED_TOKENS)]
    state, _ = a.read(longer, room)
    found["again"] = a.settle()
    b.settle()  # as a lane that has nothing to do: it looks at what the pool has
    before_ns = b.counters.restore_ns
    back, found["restore_and_take"] = b.read([*longer, 7], room)
    assert b.counters.restores == restores + 1, "it was not restored"
    found["restore"] = (b.counters.restore_ns - before_ns) / 1e6
    assert equal(state, back, len(longer)), "other bits came back"
    found |= a.branch([*prompt, 8], room)
    a.seat.take(state)
    found |= a.checkpoint(state)
    found["leave"] = timed_ms(a.seat.leave, a.seat.home)
    found["take"] = timed_ms(lambda: a.seat.take(state), a.seat.home)
    assert equal(state, back, len(longer)), "other bits came back to the seat"
    found |= a.turn_to([first % 50_000] * 100, 400)
    assert equal(state, back, len(longer)), "other bits left the seat"
    a.settle()
    a.read([n + 7 for n in prompt], room, range(tokens // 6, tokens - 5, tokens // 6))
    found["park_marked"] = a.settle()
    return found


def copies(size_bytes: int, device: str) -> dict[str, float]:
    """Of so many bytes in one piece, pinned: milliseconds each way."""
    there, here = torch.zeros(size_bytes, dtype=torch.uint8, device=device), torch.zeros(size_bytes, dtype=torch.uint8)
    here = here.pin_memory()

    def one(to: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    return {
        "copy_to_host": min(one(here, there) for _ in range(5)),
        "copy_back": min(one(there, here) for _ in range(5)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.parking", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--device", type=asked.device, choices=["cuda", "cpu"], default="cuda")
    add("--scale", choices=sorted(SHAPES), default="true")
    add("--tokens", type=int, default=25_000, help="of the conversation (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each way (default: %(default)s)")
    add("--out", type=Path, help="also write the object to this file")
    add("--trace", type=Path, help="a chrome trace of one more conversation's way")
    options = parser.parse_args(argv)
    if options.device == "cuda":
        cuda.start()
    spec = Spec.from_config(asdict(SHAPES[options.scale].config))
    shape = spec.state_shape(torch.bfloat16)
    size_bytes, device = shape.bytes(options.tokens), options.device
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        server = stack.enter_context(ParkServer(Path(name) / "park.sock", 2 * size_bytes + 8 * shape.fixed_bytes()))
        room = options.tokens + 2 * ADDED_TOKENS
        a, b = (Lane(Path(server.path), shape, room, device) for _ in range(2))
        for lane in (a, b):
            stack.callback(lane.close)
        if device == "cuda" and not (a.arena.pinned and b.arena.pinned):
            raise SystemExit("host memory cannot be registered here")
        for number in range(WARM + options.repeats):
            found.append(once(a, b, options.tokens, number * 1000))
            for lane in (a, b):
                lane.held.forget()
        if options.trace is not None:
            with torch.profiler.profile() as profile:
                once(a, b, options.tokens, len(found) * 1000)
            profile.export_chrome_trace(str(options.trace))
    figures = {key: statistics.median(one[key] for one in found[WARM:]) for key in found[0]}
    figures["park_first"] = found[0]["park"]
    if device == "cuda":
        figures |= copies(size_bytes, device)
    result = frame(
        "bench.parking", [word for word in (sys.argv[1:] if argv is None else argv) if "/" not in word],
        pack={"shape": options.scale, "values": "random"},
        conditions={"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "tokens": options.tokens,
                    "state_bytes": size_bytes, "repeats": options.repeats},
        packages=("torch", "xxhash"),
    )  # fmt: skip
    whole = ("park", "restore", "restore_and_take", "leave", "take", "copy_to_host", "copy_back")
    rates = {key: round(size_bytes / 1e6 / figures[key], 2) for key in whole if key in figures}
    link = {
        key: round(figures[way] / figures[key], 3)
        for way, keys in (("copy_to_host", ("park", "leave")), ("copy_back", ("restore", "take")))
        for key in keys
        if way in figures
    }
    rounded = {key: round(ms, 2) for key, ms in figures.items()}
    write({**result, "milliseconds": rounded, "gigabytes_per_s": rates, "of_the_link": link}, options.out)
    return 0


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # the figures alone go out
    sys.exit(main())
