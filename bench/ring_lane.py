"""A lane whose ring has exactly so many slots, as far as an eighth of its cache allows: for sweeps (bench.prefill).

    python -m bench.ring_lane SLOTS <options of python -m lanes>

A lane chooses its ring by measured rates and has no option for it. Not here: the lane.
Invariant: torch is not loaded before the lane has set its environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lanes import limits
from lanes.__main__ import main as lane


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the lane and returns its exit code."""
    slots, *options = sys.argv[1:] if argv is None else argv
    limits.RING_SLOTS = limits.MAX_RING_SLOTS = int(slots)
    return lane(options)


if __name__ == "__main__":
    sys.exit(main())
