"""One lane: an engine process that turns token ids into token ids, on one GPU or on CPU cores.

Run it with `python -m lanes --help`; other processes speak lane.proto to it. It knows no text, no users, no cluster.
"""

from __future__ import annotations

from lanes.errors import LaneError

__all__ = ["LaneError"]
