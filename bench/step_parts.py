"""Where the time of a lane's decode steps goes, by timing the lane's own functions from outside, one thread.

Of a CPU lane all parts can be told; a captured window of a GPU lane is one call, of which only the whole is seen here.
What cannot be told is None, never estimated. Not here: the steps (own_lane).

Invariant: counting begins with the first token drawn, so no prompt window is in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lanes.answer import Answer
from lanes.experts.store import ExpertStore
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.runner import ModelRunner

_WHOLE: tuple[tuple[str, type, str], ...] = (
    ("window", ModelRunner, "forward"),
    ("cache_turn", ModelRunner, "end_window"),
    ("sampling", Answer, "draw"),
)
_INSIDE: tuple[tuple[str, type, str], ...] = (
    ("experts", ExpertStore, "forward"),
    ("attention", Attention, "__call__"),
    ("deltanet", DeltaNet, "__call__"),
)
# What only a GPU lane has apart, and a CPU lane computes in one call of its kernel.
APART = ("resident_experts", "cpu_share", "link_share", "handshake")


@dataclass(slots=True)
class Parts:
    """Nanoseconds by part."""

    inside: bool  # a window's inside can be seen
    spent_ns: dict[str, int] = field(default_factory=dict)
    counting: bool = False

    def milliseconds(self, steps: int, step_ms: float) -> dict[str, float | None]:
        """Of one of so many steps, each of which took `step_ms` on average."""
        each = {name: spent / 1e6 / steps for name, spent in self.spent_ns.items()}
        window = each.get("window", 0.0)
        outside = window + each.get("sampling", 0.0) + each.get("cache_turn", 0.0)
        told: dict[str, float | None] = dict.fromkeys(("dense", "experts", "attention", "deltanet", *APART))
        if self.inside:
            parts = {name: each.get(name, 0.0) for name, _, _ in _INSIDE}
            told |= {**parts, "dense": window - sum(parts.values())}
        told |= {name: each.get(name, 0.0) for name, _, _ in _WHOLE}
        told |= {"step": step_ms, "other": step_ms - outside}
        return {name: None if value is None else round(value, 4) for name, value in told.items()}


@contextlib.contextmanager
def timed(device: str) -> Iterator[Parts]:
    """Times everything of this process until the block ends."""
    parts = Parts(inside=device == "cpu")
    with contextlib.ExitStack() as stack:
        for name, owner, method in (*_WHOLE, *(_INSIDE if parts.inside else ())):
            original: Callable[..., Any] = getattr(owner, method)
            setattr(owner, method, _timing(parts, name, original))
            stack.callback(setattr, owner, method, original)
        yield parts


def _timing(parts: Parts, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        began_ns = time.perf_counter_ns()
        result = function(*arguments, **named)
        took_ns = time.perf_counter_ns() - began_ns
        if parts.counting:
            parts.spent_ns[name] = parts.spent_ns.get(name, 0) + took_ns
        parts.counting |= name == "sampling"
        return result

    return call
