"""How long a window's layers keep the device before their experts can begin: from the end of a layer's experts to the
next layer's routing, by the device's clock. As long the link has to be busy with what it may copy ahead.

Not here: what follows from it (reading). Nothing is measured on a processor.
"""

from __future__ import annotations

import torch

LONGEST = 0.9  # of the layers: those with attention take longer, and a link that waits costs more than a slot


class Prelude:
    """Of one window; everything but `seconds` only enqueues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._over: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def over(self) -> None:
        """The device has been given a layer's experts."""
        self._over = self._now()

    def told(self) -> None:
        """The device has been given a layer's routing."""
        if self._over is not None and (now := self._now()) is not None:
            self._pairs.append((self._over, now))
        self._over = None

    def seconds(self) -> float | None:
        """Of nine layers in ten at most, once the device has finished; None where nothing was measured."""
        took = sorted(over.elapsed_time(told) for over, told in self._pairs if told.query())
        return took[int(LONGEST * (len(took) - 1))] / 1e3 if took else None

    def _now(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
