"""How late an event loop wakes up beside a thread that computes in Python: `python -m bench.loop_wakes`.

For several switch intervals of the interpreter by turns, and without the thread. It is why the coordinator has its own
interval (coordinator.pauses). Not here: the coordinator. Times are of sleeps of 5 ms, beyond those.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time

from bench import result

INTERVALS_S = (None, 5e-3, 1e-3, 1e-4)  # None: no thread
SLEEP_S = 0.005


def compute(stop: threading.Event) -> None:
    """Python code that never waits."""
    total = 0
    while not stop.is_set():
        total += sum(range(100))


async def late_s(sleeps: int) -> list[float]:
    """How late each wake-up was."""
    found = []
    for _ in range(sleeps):
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        found.append(time.perf_counter() - began - SLEEP_S)
    return found


async def beside(interval_s: float | None, sleeps: int) -> list[float]:
    """With a thread at that switch interval, or without one."""
    if interval_s is None:
        return await late_s(sleeps)
    stop, before = threading.Event(), sys.getswitchinterval()
    thread = threading.Thread(target=compute, args=(stop,))
    sys.setswitchinterval(interval_s)
    thread.start()
    try:
        return await late_s(sleeps)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


async def measure(rounds: int, sleeps: int) -> dict[str, dict[str, float]]:
    """Milliseconds, by interval."""
    late: dict[str, list[float]] = {}
    for _ in range(rounds):
        for interval_s in INTERVALS_S:
            name = "no thread" if interval_s is None else f"{1e3 * interval_s:g} ms"
            late.setdefault(name, []).extend(await beside(interval_s, sleeps))
    return {
        name: {f"p{part}": round(1e3 * sorted(each)[len(each) * part // 100], 2) for part in (50, 90)}
        for name, each in late.items()
    }


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleeps", type=int, default=100)
    options = parser.parse_args()
    measured = asyncio.run(measure(options.rounds, options.sleeps))
    framed = result.frame("bench.loop_wakes", [], pack={}, conditions=vars(options))
    result.write({**framed, "late_ms": measured}, None)


if __name__ == "__main__":
    main()
