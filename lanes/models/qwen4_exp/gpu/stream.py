"""A hyper-connection of a window: the last block's result enters the streams, and the next one's input leaves them."""

from __future__ import annotations

from lanes.kernels.stream import enter, lift, lower
from lanes.models.qwen4_exp.gpu.activations import Activations
from lanes.models.qwen4_exp.stream import Mixer


class MixerWindow:
    """Twin of `lanes.models.qwen4_exp.stream.Mixer`."""

    def __init__(self, mixer: Mixer, eps: float) -> None:
        self._mixer, self._eps = mixer, eps

    def run(self, a: Activations) -> None:
        """x += injection * result; then u and the injection of the block that reads it."""
        mixer = self._mixer
        enter(a.x, a.result, a.injection, mixer.norm, a.normed, a.normed_rounded, self._eps)
        lower(a.normed_rounded, mixer.down, a.squashed_rounded, a.injection)
        lift(a.squashed_rounded, mixer.up, a.normed, a.u, a.u_rounded)
