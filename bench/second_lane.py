"""What the second lane costs the host: one owner, one lane, then two, over a region of at least 1 GiB.

Writes a small random model with many experts, packs it, starts the real processes, sends each lane the same prompt
(long enough that every expert is read) and compares the sums of PSS. Not here: how memory is read (memory).
Invariant: nothing started here outlives it, and the files it made are gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from bench import tied
from bench.checkpoint import PRESETS, write_checkpoint
from bench.memory import RegionMemory, host_used_bytes, region_memory
from bench.result import frame, write
from laneproto.v1 import lane_pb2, lane_pb2_grpc

HIDDEN = INTERMEDIATE = 512  # an f32 record of 3 MiB: the least work for a region of a given size
LAYERS = 8
PROMPT_TOKENS = 2048
READY_LIMIT_S = 300.0
LAST_WORDS = 8  # lines
MOST_OF_A_LINE = 2000  # characters
ENDS_WITHIN_S = 3.0
CACHE = "16MiB"


class StartFailed(RuntimeError):
    """A process ended, or was not ready in time."""


def make_pack(folder: Path, region_gib: float) -> Path:
    """A pack whose region has at least `region_gib`."""
    layer_bytes = int(region_gib * 2**30) // LAYERS
    config = replace(
        PRESETS["demo"], hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_experts=-(-layer_bytes // (3 * HIDDEN * INTERMEDIATE * 4)), num_experts_per_tok=8,
    )  # fmt: skip
    checkpoint, pack = folder / "checkpoint", folder / "pack"
    write_checkpoint(checkpoint, config, dtype="bf16", mtp=False)
    command = [sys.executable, "-m", "shared_experts", "pack", str(checkpoint), str(pack), "--experts", "f32"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    for file in checkpoint.iterdir():
        file.unlink()
    return pack


class Child:
    """A process that logs JSON lines; `event` waits for one of them."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            tied.argv("-m", *arguments, "--log-json"),
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._events: dict[str, dict[str, object]] = {}
        self._words: deque[str] = deque(maxlen=LAST_WORDS)  # what it wrote that is no event
        self._last: deque[str] = deque(maxlen=LAST_WORDS)  # of all
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line.rstrip()[:MOST_OF_A_LINE])
                try:
                    event = json.loads(line)
                except ValueError:
                    self._words.append(line.rstrip())
                    continue
                with self._changed:
                    self._events[event["event"]] = event
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def event(self, name: str) -> dict[str, object]:
        """The last event of this name, waited for; raises StartFailed."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._events or self._ended, READY_LIMIT_S)
            if name not in self._events:
                said = "\n".join([str(event) for event in list(self._events.values())[-1:]] + list(self._words))
                raise StartFailed(f"no {name!r} from process {self.pid}; last:\n{said}")
            return self._events[name]

    def said(self, name: str) -> dict[str, object]:
        """The last event of this name without its frame; nothing where there was none."""
        with self._changed:
            event = self._events.get(name, {})
        return {key: value for key, value in event.items() if key not in ("event", "lane", "level", "timestamp")}

    def last_words(self) -> str:
        """What became of it, and what it said last: for the error of who asked it."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that has just failed is about to end
            self._process.wait(ENDS_WITHIN_S)
        if (code := self._process.poll()) is not None:
            self._reader.join(ENDS_WITHIN_S)
        end = "runs" if code is None else f"ended with {code}"
        with self._changed:
            return "\n  ".join([f"process {self.pid} {end}; it said last:", *self._last])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 20 s."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(20)  # the end of what it logged


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Child]:
    """A child until the block ends; an error of the block has what the child said last."""
    child = Child(*arguments)
    try:
        yield child
    except Exception as error:
        error.add_note(child.last_words())
        raise
    finally:
        child.stop()


def lane(run: Path, pack: Path, number: int) -> contextlib.AbstractContextManager[Child]:
    """Lane `number` of this run directory."""
    return running(
        "lanes", "--owner", str(run / "owner.sock"), "--pack", str(pack), "--device", "cpu", "--name", f"lane-{number}",
        "--listen", f"unix:{run}/lane-{number}.sock", "--vram-budget", CACHE, "--context", str(PROMPT_TOKENS + 64),
    )  # fmt: skip


def read_every_expert(run: Path, number: int, vocabulary: int) -> int:
    """Sends a prompt of random tokens; returns the expert bytes the lane read from the region."""
    ids = [(i * 7919 + 13) % (vocabulary - 16) + 16 for i in range(PROMPT_TOKENS)]
    with grpc.insecure_channel(f"unix:{run}/lane-{number}.sock") as channel:
        stub = lane_pb2_grpc.LaneStub(channel)
        request = lane_pb2.GenerateRequest(request_id=f"touch-{number}", prompt_ids=ids, max_tokens=8)
        events = list(stub.Generate(request, timeout=READY_LIMIT_S))
    finished = events[-1].finished
    if finished.error_code:
        raise StartFailed(f"lane-{number}: {finished.error_code}: {finished.error_message}")
    return int(finished.counters.expert_miss_bytes + finished.counters.expert_hit_bytes)


def shown(memory: RegionMemory) -> dict[str, object]:
    """The figures of one moment."""
    return {
        "total_pss_bytes": memory.total_pss_bytes,
        "mapping_pss_bytes_sum": memory.mapping_pss_bytes_sum,
        "owner_pss_bytes": memory.owner.all.pss_bytes,
        "lanes": [
            {
                "pss_bytes": p.all.pss_bytes,
                "private_bytes": p.all.private_bytes,
                "region_rss_bytes": p.region.rss_bytes + p.region.hugetlb_bytes,
                "region_pss_bytes": p.region.pss_bytes,
                "page_table_bytes": p.page_table_bytes,
            }
            for p in memory.lanes
        ],
    }


def measure(pack: Path, run: Path) -> dict[str, object]:
    """Owner and one lane, then the second lane; every figure that goes into the result."""
    inspect = [sys.executable, "-m", "shared_experts", "inspect", "--json", str(pack)]
    manifest = json.loads(subprocess.run(inspect, check=True, capture_output=True).stdout)
    dense_bytes = sum(s["bytes"] for s in manifest["sections"] if s["name"] == "dense")
    vocabulary = manifest["config"]["vocab_size"]
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(running("shared_experts", "own", "--pack", str(pack), "--run-dir", str(run)))
        ready = owner.event("owner_ready")
        first = stack.enter_context(lane(run, pack, 0))
        first.event("lane_ready")
        read_bytes = read_every_expert(run, 0, vocabulary)
        one, used_one = region_memory(owner.pid, [first.pid]), host_used_bytes()
        second = stack.enter_context(lane(run, pack, 1))
        second.event("lane_ready")
        read_every_expert(run, 1, vocabulary)
        two, used_two = region_memory(owner.pid, [first.pid, second.pid]), host_used_bytes()
        loaded = second.event("lane_loaded")
        attach_s = second.event("region_attached")["seconds"]
    region = two.region_bytes
    added = two.total_pss_bytes - one.total_pss_bytes
    own = {"dense": dense_bytes, "cache": loaded["cache_bytes"], "state": loaded["state_bytes"]}
    own_bytes = sum(int(str(b)) for b in own.values())
    return {
        "region_bytes": region,
        "added_by_second_lane_bytes": added,
        "own_dense_cache_state_bytes": own,
        "overhead_share_of_region": round((added - own_bytes) / region, 4),
        "within_5_percent": added - own_bytes <= 0.05 * region,
        "last_lane_private_bytes": two.last_lane_added_bytes,
        "host_used_delta_bytes": used_two - used_one,
        "expert_bytes_read_by_a_lane": read_bytes,
        "attach_s_of_second_lane": attach_s,
        "fill": {k: ready[k] for k in ("seconds", "gb_per_s", "threads", "page_bytes", "source")},
        "one_lane": shown(one),
        "two_lanes": shown(two),
        "pack": {
            **manifest["experts"], "fingerprint": manifest["fingerprint"], "dense_bytes": dense_bytes,
            "values": "random",
        },
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object; exit code 1 when the second lane costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m bench.second_lane", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--region-gib", type=float, default=6.0, help="at least 1 (default: 6)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    if options.region_gib < 1:
        parser.error("--region-gib: the definition asks for a region of at least 1 GiB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = make_pack(folder, options.region_gib)
        (folder / "run").mkdir(mode=0o700)
        figures = measure(pack, folder / "run")
    described = figures.pop("pack")
    assert isinstance(described, dict)
    result = frame(
        "bench.second_lane",
        list(argv if argv is not None else sys.argv[1:]),
        pack=described,
        conditions={
            "prompt_tokens": PROMPT_TOKENS, "lanes": "CPU, same prompt to each", "expert_cache": CACHE,
            "cpus": os.cpu_count(), "definition": "difference of the sums of PSS, page tables and 2 MiB pages",
        },
        packages=("torch", "grpcio", "numpy"),
    )  # fmt: skip
    write({**result, **figures}, options.out)
    return 0 if figures["within_5_percent"] else 1


if __name__ == "__main__":
    sys.exit(main())
