"""Coding agents, headless, against the real doors: each reads a file with a tool of its own and tells what is in it.

The lane answers by what the prompt holds: a call, then a text that quotes the tool's result.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agents import AGENTS, headless
from tests.fakes.doors import Cluster, open_doors, spelt, thinking_dir
from tests.fakes.lane import FakeLane

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

SECRET = "the kettle is blue"
# tool -> its arguments, in the order that they are looked for
CALLS: dict[str, dict[str, Any]] = {
    "Read": {"file_path": "{path}"},  # Claude Code
    "read": {"filePath": "{path}"},  # OpenCode
    "exec_command": {"cmd": "cat {path}"},  # Codex
    "shell_command": {"command": "cat {path}"},
    "shell": {"command": ["cat", "{path}"]},
}


class Reader:
    """Makes up the tokens of an answer."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self._text = cluster.doors.serving.text
        self._path = str(path)
        self.prompts: list[str] = []

    def tokens(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        prompt = "".join(map(self._text.token_text, prompt_ids))
        self.prompts.append(prompt)
        end = "" if prompt.endswith("</think>\n\n") else "I know.\n</think>\n\n"
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
        if results:
            said = "It says: " + (SECRET if SECRET in results[-1] else f"nothing, but {results[-1][:300]}")
            return spelt(f"{end}{said}<|im_end|>")
        declared = re.findall(r'\n\{"type": "function".*', prompt)
        names = {json.loads(line)["function"]["name"] for line in declared}
        name = next((name for name in CALLS if name in names), None)
        if name is None:
            return spelt(f"{end}A title<|im_end|>")
        lines = []
        for key, value in CALLS[name].items():
            text = value if isinstance(value, str) else json.dumps(value)
            lines.append(f"<parameter={key}>\n{text.format(path=self._path)}\n</parameter>\n")
        return spelt(f"{end}<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call><|im_end|>")


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_reads_a_file_and_tells(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Reader] = []
    generate = FakeLane.Generate

    async def answer(lane: FakeLane, request: Any, context: Any) -> AsyncIterator[Any]:
        lane.script_next(tokens=readers[0].tokens(request.prompt_ids))
        async for event in generate(lane, request, context):
            yield event

    monkeypatch.setattr(FakeLane, "Generate", answer)
    note = tmp_path / "work" / "note.txt"
    note.parent.mkdir()
    note.write_text(SECRET)
    async with open_doors(
        tmp_path, lanes=1, text_from=thinking_dir(), model_name="qwen", context_tokens=1 << 20
    ) as cluster:
        readers.append(Reader(cluster, note))
        url = f"http://{cluster.doors.http}"
        _, written = await headless(
            AGENTS[name], tmp_path, url=url, model="qwen", ask="What does note.txt say?", limit_s=240
        )
    assert f"It says: {SECRET}" in written, written[-3000:]
    assert len(readers[0].prompts) >= 2
