"""A hyper-connection of a window: the last block's result enters the streams, and the next one's input leaves them."""

from __future__ import annotations

from lanes.kernels import mixing
from lanes.kernels.products import FEW_ROWS
from lanes.kernels.stream import enter, lift, lower
from lanes.models.qwen4_exp.gpu.activations import Activations
from lanes.models.qwen4_exp.stream import Mixer


class MixerWindow:
    """Twin of `lanes.models.qwen4_exp.stream.Mixer`."""

    def __init__(self, mixer: Mixer, eps: float) -> None:
        self._mixer, self._eps = mixer, eps

    def run(self, a: Activations) -> None:
        """x with the last block's result in it; then u and the injection of the block that reads it."""
        mixer = self._mixer
        if len(a.x) <= FEW_ROWS:
            mixing.lower(a.x, mixer.norm, mixer.down, a.low, a.scale, self._eps)
            injects = mixer.down.shape[0] > mixer.up.shape[1]
            mixing.lift(a.low, mixer.up, a.x, a.scale, mixer.norm, a.injection, a.u, a.u_rounded, injects=injects)
            return
        enter(a.x, a.result, a.injection, mixer.norm, a.normed, a.normed_rounded, self._eps)
        lower(a.normed_rounded, mixer.down, a.squashed_rounded, a.injection)
        lift(a.squashed_rounded, mixer.up, a.normed, a.u, a.u_rounded)
