"""What an answer says of a prompt that was read with resident-only routing. Only then is there anything to say.

Not here: the rest of usage (each API's answers). Invariant: an exact answer's usage has nothing of this.
"""

from __future__ import annotations

from typing import Any

from laneproto.v1 import lane_pb2

LABEL = "prefill-routing-vram"  # as lanes say it


def read_so(usage: lane_pb2.Usage) -> bool:
    """Whether the prompt was, or what is cached of it."""
    return LABEL in usage.approximations


def prompt_routing(usage: lane_pb2.Usage) -> dict[str, Any]:
    """An extension of a usage object: empty for a prompt that was read exactly."""
    if not read_so(usage):
        return {}
    said = {"routing": "vram", "choices": usage.prompt_choices, "replaced_choices": usage.replaced_choices}
    return {"prompt_routing": said}
