"""The loop of every fuzz target: inputs until the time is over, each inside the same bounds.

A target says how inputs are drawn, what is done with one and which errors are an answer. Its `check` returns for an
accepted input, having asserted what must hold of it, and raises one of `refusals` for a refused one. Anything else that
it raises, more than a second of processor time or more than 32 MiB at once is a finding: hypothesis shrinks it and
prints it.

EXPRESSWAY_FUZZ_SECONDS is the time of each target.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("EXPRESSWAY_FUZZ_SECONDS", "3"))
CPU_LIMIT_S = 1.0
MEMORY_LIMIT_BYTES = 32 << 20
_BATCH = settings(
    max_examples=100, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
)  # fmt: skip


def fuzz(
    inputs: SearchStrategy[Any], check: Callable[[Any], object], refusals: tuple[type[Exception], ...]
) -> Counter[str]:
    """Feeds `check`; how many inputs were accepted and refused, of both at least one where there are refusals."""
    seen: Counter[str] = Counter()

    @_BATCH
    @given(inputs)
    def batch(value: Any) -> None:
        tracemalloc.start(1)  # only now: it would slow the drawing of inputs threefold
        before_s = time.process_time()
        try:
            check(value)
            seen["accepted"] += 1
        except refusals as refused:
            seen["refused" if str(refused) else "refused without a reason"] += 1
        finally:
            used_s, used_bytes = time.process_time() - before_s, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert used_s <= CPU_LIMIT_S, f"{used_s:.1f} s of processor time"
        assert used_bytes <= MEMORY_LIMIT_BYTES, f"{used_bytes} bytes at once"

    # What the process holds from before is no input's: collecting among it would take a second of its own.
    gc.collect()
    gc.freeze()
    end_s = time.monotonic() + SECONDS
    try:
        batch()
        while time.monotonic() < end_s:
            batch()
    finally:
        gc.unfreeze()
    print(f"{seen.total()} inputs, {seen['accepted']} accepted, {seen['refused']} refused")
    kinds = {"accepted", "refused"} if refusals else {"accepted"}
    assert set(seen) == kinds, f"inputs of one kind only show nothing: {seen}"
    return seen
