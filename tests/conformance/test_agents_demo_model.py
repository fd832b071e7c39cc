"""The same agents on a real model and real lanes: each gets an answer, whatever a model of that size has to say.

Needs the agents (`EXPRESSWAY_AGENTS`), and the demo model's pack or another one (`EXPRESSWAY_AGENTS_PACK`).
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.agents import AGENTS, headless, program
from tests.fakes.serving import Served

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.timeout(1500)]

PACK = Path(os.environ.get("EXPRESSWAY_AGENTS_PACK") or Path(__file__).parents[2] / "deploy" / "demo_model" / "pack")
LIMIT_S = 1200.0
# A model of that size may not know when to stop. An agent that read such an answer to its end says this.
CUT = {"codex": "Incomplete response returned, reason: max_output_tokens", "claude": "output token maximum"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    for name in AGENTS:
        program(name)
    if not PACK.is_dir():
        pytest.skip("no pack of the demo model")
    with Served(PACK, "--lanes", "2") as found:
        yield found


def snapshot(served: Served) -> dict:
    with urllib.request.urlopen(f"http://{served.cluster['page']}/snapshot", timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_gets_an_answer(name: str, served: Served, tmp_path: Path) -> None:
    before = snapshot(served)["totals"]
    code, written = await headless(
        AGENTS[name], tmp_path, url=f"http://{served.cluster['http']}", model=served.status()["model"]["name"],
        ask="Say hello in one short sentence.", limit_s=LIMIT_S, CLAUDE_CODE_MAX_OUTPUT_TOKENS="2048",
    )  # fmt: skip
    after = snapshot(served)
    assert code == 0 or CUT.get(name, "\0") in written, written[-3000:]
    assert after["totals"]["answers"] > before["answers"], written[-3000:]
    assert after["totals"]["failed"] == before["failed"], after["errors"]
    print(f"{name}: {after['conversations'][:1]}\n{written[-500:]}")
