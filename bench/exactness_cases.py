"""What a pack's lane on a GPU must hold to the bit, and what must end as an error: each case returns its figures or
raises.

Bit-equal cases compare a lane with itself: whatever is cached, copied, computed by whom. Not here: whatever becomes of
sequences (exactness_states), what is equal within a tolerance (exactness_margins), the command and its table
(exactness), the lanes (gpu_lane_rig).

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.frozen import Frozen, threads
from bench.gpu_lane_rig import Lane, cpu_lane, gpu_lane
from lanes.device.pin import PinnedRegion
from lanes.errors import HandshakeLost
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.prompt import Means
from lanes.experts.store import Interrupted
from shared_experts.attach import attach_descriptor
from shared_experts.fill import build
from shared_experts.pack import Pack
from shared_experts.region import RegionShape

RINGS = (1, 2, 3)  # slots
CHUNKS = (1, 3)  # of a prompt
CANCELS = (False, True)  # with records copied as they are chosen, ahead
LOST_S = 13.0  # a lost handshake is an error before that: 10 s, for a thread that stands still 11
# (rows, right ones) of trial windows: every length with every number of right rows.
TRIALS = [(rows, right) for rows in (2, 3, 4) for right in range(rows)]


@dataclass(frozen=True, slots=True)
class Ground:
    """On what the cases run."""

    pack: Pack
    device: str
    ids: list[int]
    prompt: int  # of them; windows read the rest, across the edge at which a query no longer reads everything
    context_tokens: int
    layers: int | None = None  # of the model, the first ones; None: all

    @property
    def rest(self) -> list[int]:
        """What windows read."""
        return self.ids[self.prompt :]

    def lane(
        self, *, slots: int = 0, drafts: bool = False, capture: bool | None = None, shared: bool = False
    ) -> Lane:  # fmt: skip
        """The lane on the GPU."""
        return gpu_lane(
            self.pack, self.device, slots=slots, drafts=drafts, capture=capture, shared=shared,
            context_tokens=self.context_tokens, layers=self.layers,
        )  # fmt: skip

    def cpu(self, *, drafts: bool = False, dtype: torch.dtype | None = None) -> Lane:
        """The lane on the CPU; with a type that of its matrices, keys and values, as a GPU's are."""
        return cpu_lane(
            self.pack, drafts=drafts, dtype=dtype, context_tokens=self.context_tokens, layers=self.layers
        )  # fmt: skip

    def said(self, lane: Lane, sizes: Sequence[int] = (1,)) -> torch.Tensor:
        """Logits [T, V] of the rest, after the prompt in one chunk."""
        slot = lane.begin(self.ids[: self.prompt])
        logits = lane.windows(self.rest, slot, sizes)
        close(lane, slot)
        return logits


def bit_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares logits, which say something: none is the same in every place, or no number."""
    assert (want.amax(1) > want.amin(1)).all(), "rows of logits that say nothing"
    assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} logits differ"


def repeats(ground: Ground) -> str:
    """The same again, and launched one by one where graphs are, trial windows too."""
    lane = ground.lane()
    want = ground.said(lane)
    bit_equal(ground.said(lane), want)
    if ground.device == "cuda":
        launched = ground.lane(capture=False)
        bit_equal(ground.said(launched), want)
        for rows, right in ((2, 1), (3, 1), (4, 2)):
            for captured, one in zip(
                *(trials(each, ground, rows, right, 0, wrong=True) for each in (lane, launched)), strict=True
            ):
                bit_equal(captured, one)
    return f"{len(want)} tokens"


def cached(ground: Ground) -> str:
    """No expert cached, a tenth, half, all; three times each."""
    info = ground.pack.manifest.experts
    every, want, hits = info.layers * info.experts, None, []
    for slots in (0, max(1, every // 10), every // 2, every):
        lane = ground.lane(slots=slots)
        for _ in range(3):  # what the first has cached the next ones hit
            got = ground.said(lane, [1, 2, 3, 4])
            bit_equal(got, got if want is None else want)
            want = got
        asked = lane.counters.expert_hits + lane.counters.expert_misses
        hits.append(f"{100 * lane.counters.expert_hits / asked:.0f} %")
    return "hits " + ", ".join(hits)


def shared(ground: Ground) -> str:
    """None of a layer's misses by the CPU, half, all."""
    want, lane = ground.said(ground.lane()), ground.lane(shared=True)
    assert lane.share is not None
    try:
        for share in (0.0, 0.5, 1.0):
            lane.share.split((lane.share.most * share).astype(np.int32))
            bit_equal(ground.said(lane), want)
    finally:
        lane.close()
    return f"0, 0.5, 1 by {type(lane.share.doorbell).__name__}"


def rejected(ground: Ground) -> str:
    """What rejected rows held changes nothing: right tokens and wrong ones (the end of sequence among them), at every
    position, of every length, dropped windows too."""
    lane, windows = ground.lane(), 0
    for rows, right in TRIALS:
        for shift in range(max(1, right)):
            took, dropped = trials(lane, ground, rows, right, shift, wrong=False)
            for got, want in zip(trials(lane, ground, rows, right, shift, wrong=True), (took, dropped), strict=True):
                bit_equal(got, want)
            windows += 2 * len(took)
    return f"{windows} rows"


def trials(
    lane: Lane, ground: Ground, rows: int, right: int, shift: int, *, wrong: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] of the rows that were kept, and of the first row of each window that was not (of one row, if
    none)."""
    end, vocab = ground.ids, int(str(ground.pack.manifest.config["vocab_size"]))
    eos = int(str(ground.pack.manifest.config.get("eos_token_id", 0)))
    slot, at, out, dropped = lane.begin(end[: ground.prompt]), ground.prompt, [], []
    if shift:
        out.append(lane.windows(end[at : at + shift], slot, [1]))
        at += shift
    while at + rows <= len(end):
        ids, kept = end[at : at + rows], max(1, right)
        if wrong:
            ids = [
                *ids[:kept],
                *(eos if (at + n) % 3 == 0 else (token + 7) % vocab for n, token in enumerate(ids[kept:])),
            ]
        logits = lane.trial(ids, slot, right)
        if right:
            out.append(logits[:right])
        else:
            dropped.append(logits[:1])
            out.append(lane.windows(end[at : at + 1], slot, [1]))
        at += kept
    close(lane, slot)
    return torch.cat(out), torch.cat(dropped or out[:1])


def windows_on_the_cpu(ground: Ground) -> str:
    """A lane on the CPU: windows of two to four rows, and trial windows of every length and outcome."""
    lane = ground.cpu()
    want = ground.said(lane)
    for rows in (2, 3, 4):
        bit_equal(ground.said(lane, [rows]), want)
    for rows, right in TRIALS:
        got = trials(lane, ground, rows, right, 0, wrong=True)[0]
        bit_equal(got, want[: len(got)])
    return f"{(3 + len(TRIALS)) * len(want)} rows to the bit"


def prompts(ground: Ground) -> str:
    """In place, and copied as chosen or ahead through rings of 1 to 3 slots, after a cancel before any layer, on a new
    lane: for each size of chunk the same bits."""
    info, copied = ground.pack.manifest.experts, 0
    layers = info.layers - info.draft_layers
    for rows in (ground.prompt // parts for parts in CHUNKS):
        want = _read(ground.lane(), ground, rows)
        for ahead, slots in itertools.product((False, True), RINGS):
            lane = ground.lane(slots=8 * slots)
            lane.prompter = None
            assert isinstance(lane.experts, GpuExperts)
            means = Means(ahead=ahead, slots=slots)
            lane.experts.feeding = lambda _, means=means: means  # type: ignore[misc]
            cancels = ahead in CANCELS and slots == RINGS[-1] and rows == ground.prompt
            for before in range(layers if cancels else 1):
                if before:
                    _cancelled(lane, ground, before)
                bit_equal(_read(lane, ground, rows), want)
            copied += lane.counters.streamed_bytes // info.record_bytes
    return f"{copied} records copied"


def _read(lane: Lane, ground: Ground, rows: int) -> torch.Tensor:
    """Logits of a prompt's last row, in chunks of so many rows, and of one more token."""
    lane.prompter = None
    slot, ids = lane.states.open(ground.context_tokens), ground.ids[: ground.prompt]
    cut = (len(ids) - 1) // rows * rows
    if cut:
        lane.windows(ids[:cut], slot, [rows], logits="none")
    first = lane.windows(ids[cut:], slot, [rows], logits="last")
    second = lane.windows(ground.rest[:1], slot, [1])
    close(lane, slot)
    return torch.cat((first, second))


def _cancelled(lane: Lane, ground: Ground, layers: int) -> None:
    """A prompt that is left before that layer, as the runner leaves one."""
    left = iter([False] * layers)
    lane.experts.stopped = lambda: next(left, True)
    slot = lane.states.open(ground.context_tokens)
    with contextlib.suppress(Interrupted):
        lane.windows(ground.ids[: ground.prompt], slot, [ground.prompt], logits="last")
        raise AssertionError("nobody stopped")
    lane.experts.stopped = lambda: False
    lane.experts.end_window()
    lane.states.close(slot)


def not_finite(ground: Ground) -> str:
    """One expert's record overwritten with NaN: logits are as ever until a token chooses it, then not finite."""
    info, used = ground.pack.manifest.experts, list[set[int]]()
    lane = ground.lane()
    lane.experts.recorder = lambda touched: used.append(set(touched.keys.tolist()))
    want = _alone(lane, ground)
    place = next(at for at in range(2, len(used)) if used[at] - set[int]().union(*used[:at]))
    expert = min(used[place] - set[int]().union(*used[:place]))
    with tempfile.TemporaryDirectory() as folder:
        poisoned = Path(folder) / "pack"
        shutil.copytree(ground.pack.path, poisoned)
        with (poisoned / ground.pack.experts_path.name).open("r+b") as file:
            file.seek(expert * info.record_bytes)
            file.write(b"\x7e" * info.record_bytes)  # any two of these bytes are an fp16 NaN
        with Pack.open(poisoned) as pack:
            got = _alone(replace(ground, pack=pack).lane(), ground)
    bit_equal(got[:place], want[:place])
    assert not got[place].isfinite().all(), "a NaN was lost on its way"
    return f"expert {expert % info.experts} of layer {expert // info.experts}, from token {place} on"


def _alone(lane: Lane, ground: Ground) -> torch.Tensor:
    """Logits [T, V] of the first tokens of the rest, after nothing."""
    slot = lane.states.open(ground.context_tokens)
    logits = lane.windows(ground.rest[:8], slot, [1])
    close(lane, slot)
    return logits


def region(ground: Ground) -> str:
    """A sealed region, registered read-only: a record's bytes as the device reads them in place."""
    if ground.device != "cuda":
        return "no device"
    from lanes.experts.gpu import driver

    info, shape = ground.pack.manifest.experts, RegionShape.of(ground.pack.manifest)
    sealed = build(ground.pack.experts_path, shape, threads=2, on_step=lambda *_: None)
    with attach_descriptor(sealed.fd, shape) as there, PinnedRegion(there.base_address, there.mapped_bytes) as pinned:
        address = pinned.device_address(there.record_address(1, 2))
        assert pinned.mode == "mapped", f"mode {pinned.mode}"
        assert address is not None
        found = torch.zeros(info.record_bytes, dtype=torch.uint8, device=ground.device)
        driver.copy(found.data_ptr(), address, info.record_bytes, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert bytes(found.cpu().numpy()) == bytes(there.record(1, 2)), "other bytes"
        return f"{there.mapped_bytes} bytes in {pinned.seconds * 1e3:.1f} ms"


def lost_thread(ground: Ground) -> str:
    """The CPU share's thread stands still within a window: an error in time, no hang."""
    others = threads()
    lane = ground.lane(shared=True)
    assert lane.share is not None
    lane.share.split(lane.share.most)
    slot = lane.begin(ground.ids[: ground.prompt])
    lane.windows(ground.rest[:1], slot, [1])
    frozen, began = Frozen(others), time.monotonic()
    try:
        lane.windows(ground.rest[1:2], slot, [1])
    except HandshakeLost as error:
        took = time.monotonic() - began
        assert took < LOST_S, f"after {took:.1f} s"
        return f"{error.code} after {took:.1f} s"
    finally:
        frozen.thaw()
        lane.close()
    raise AssertionError("nobody noticed")


def close(lane: Lane, slot: int) -> None:
    """Ends a sequence that has run."""
    lane.model.settle(lane.states[slot])
    lane.states.close(slot)


Case = Callable[[Ground], str]
BITS: dict[str, Case] = {
    "region read in place": region,
    "repeat, graphs and launches": repeats,
    "cache 0, 10 %, 50 %, all": cached,
    "CPU share of misses": shared,
    "rejected rows": rejected,
    "windows of a lane on the CPU": windows_on_the_cpu,
    "prompt: rings, cancels, new lane": prompts,
}
FAILURES: dict[str, Case] = {"a NaN in one expert": not_finite, "the share's thread lost": lost_thread}
