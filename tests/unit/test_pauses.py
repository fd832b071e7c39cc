"""What keeps the event loop from standing still: threads that give way, garbage, long work beside it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator import limits, serving
from tests.fakes.doors import open_doors

PROGRAM = """
import gc, sys
from coordinator.pauses import give_way, leave_out_of_search
kept = [[] for _ in range(1000)]
assert sys.getswitchinterval() > 1e-3 and gc.get_freeze_count() == 0
give_way()
leave_out_of_search()
assert sys.getswitchinterval() <= 1e-3 and gc.get_freeze_count() > 1000
print("held")
"""


def test_threads_give_way_and_what_stays_is_left_out() -> None:
    """In a process of its own: both hold for a whole process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "held\n", done.stderr


@pytest.mark.parametrize("tokens", [4, 5])
async def test_a_long_prompt_is_checked_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """At the limit on the loop, one token more in a thread; the answer is the same."""
    checked: list[threading.Thread] = []
    check = serving.check

    def watched(*args, **more):
        checked.append(threading.current_thread())
        return check(*args, **more)

    monkeypatch.setattr(serving, "check", watched)
    monkeypatch.setattr(limits, "INLINE_PROMPT_TOKENS", 4)
    ids = list(range(5, 5 + tokens))
    async with open_doors(tmp_path, lanes=1) as cluster:
        status, _, answer = await cluster.post("/v1/completions", {"prompt": ids, "max_tokens": 2})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, tokens)
        assert list(cluster.lanes[0].requests[0].prompt_ids) == ids
        status, _, answer = await cluster.post("/v1/completions", {"prompt": [*ids[1:], 10**6], "max_tokens": 2})
        assert (status, answer["error"]["code"]) == (400, "token_out_of_range")
    on_loop = [thread is threading.main_thread() for thread in checked]
    assert on_loop == [tokens == 4] * 2
