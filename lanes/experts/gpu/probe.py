"""Which way of ringing the doorbell works on this GPU, found by doing it: windows through a captured graph, every bit.

A window of random activations through every decoder layer is computed without the CPU's share, then replayed with the
CPU taking every miss, several times. Kernels come first: they were 2 % faster on an H200 before they began early.
Stream memory operations, refused by some drivers and silently wrong in replays of others, are the way that remains. Not
here: what a doorbell is (doorbell).

Invariant: a share that comes back has answered REPLAYS windows with the bits of a window without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from lanes.device.capture import captured as graph_of
from lanes.errors import EngineFailed, GpuFailed, StartError
from lanes.experts.gpu.doorbell import KernelWords, StreamWords
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.share import Share

REPLAYS = 3
WAIT_S = 20.0  # longer than a share takes to give a window up
KINDS: tuple[type[StreamWords] | type[KernelWords], ...] = (KernelWords, StreamWords)


def attach(experts: GpuExperts, make: Callable[[], Share], on_refused: Callable[[str, str], None]) -> Share:
    """A share that works, attached to `experts`, every miss the CPU's; raises StartError where none does.

    `make` opens a new share each time. `on_refused` hears the doorbell's name and what was wrong with it.
    """
    kinds = KINDS if experts.device.type == "cuda" else (KernelWords,)
    for kind in kinds:
        share = make()
        share.split(share.most)
        share.doorbell = kind(*share.words)
        try:
            wrong = _wrong(experts, share)
        except (EngineFailed, RuntimeError) as error:
            wrong = str(error)
        experts.discard_window()
        if not wrong:
            experts.attach(share)
            return share
        experts.attach(None)
        share.close()
        on_refused(kind.name, wrong)
    raise StartError("no doorbell between this GPU and its host works: see the log")


def _wrong(experts: GpuExperts, share: Share) -> str:
    """What a window with this share does wrong, "" for nothing."""
    layers = experts.decoder_layers
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, experts.info.hidden, generator=generator)
    scores = torch.rand(layers, experts.info.experts, generator=generator)
    ids = scores.topk(experts.chosen, dim=1).indices.sort(dim=1).values
    weights = torch.rand(1, experts.chosen, generator=generator)
    x, weights = x.to(experts.device), weights.to(experts.device)
    chosen = ids.to(torch.int32).to(experts.device)
    out = torch.empty(layers, 1, experts.info.hidden, device=experts.device)

    def window() -> None:
        for layer in range(layers):
            experts.launch(layer, x, chosen[layer : layer + 1], weights, out[layer])

    experts.attach(None)
    window()
    want = out.clone()
    experts.attach(share)
    with captured(window, experts.device) as replay:
        for _ in range(REPLAYS):
            out.zero_()
            share.begin(layers)
            replay()
            _finish(experts.device)
            share.end()
            if not torch.equal(out, want):
                return "its values are wrong"
    return ""


def _finish(device: torch.device) -> None:
    """Waits for the stream, but not for ever."""
    if device.type != "cuda":
        return
    event, until_s = torch.cuda.Event(), time.monotonic() + WAIT_S
    event.record()
    while not event.query():
        if time.monotonic() > until_s:
            raise GpuFailed("a window that waits for the CPU's share does not end")
        time.sleep(1e-4)


@contextlib.contextmanager
def captured(window: Callable[[], None], device: torch.device) -> Iterator[Callable[[], None]]:
    """Replays of a window's launches as one graph, which are run once before, to be compiled; without a GPU, calls."""
    if device.type != "cuda":
        yield window
        return
    window()
    torch.cuda.synchronize()
    graph = graph_of(window)
    yield graph.replay
    graph.reset()
