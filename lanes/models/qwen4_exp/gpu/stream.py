"""A hyper-connection of a window: the last block's result enters the streams, and the next one's input leaves them."""

from __future__ import annotations

from lanes.kernels.stream import enter, mix, squash
from lanes.models.qwen4_exp.gpu.activations import Activations, multiply
from lanes.models.qwen4_exp.stream import Mixer


class MixerWindow:
    """Twin of `lanes.models.qwen4_exp.stream.Mixer`."""

    def __init__(self, mixer: Mixer, eps: float, *, injects: bool) -> None:
        self._mixer, self._eps, self._injects = mixer, eps, injects

    def run(self, a: Activations) -> None:
        """x += injection * result; then u and the injection of the block that reads it."""
        mixer = self._mixer
        low = a.low if self._injects else a.last_low
        enter(a.x, a.result, a.injection, mixer.norm, a.normed, a.normed_rounded, self._eps)
        multiply(a.normed_rounded.flatten(1), mixer.down, low)
        squash(low, a.squashed_rounded, a.injection)
        multiply(a.squashed_rounded, mixer.up, a.lifted)
        mix(a.lifted.view_as(a.normed), a.normed, a.u, a.u_rounded)
