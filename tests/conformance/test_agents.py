"""Coding agents, headless, against the real doors: each reads a file with a tool of its own and tells what is in it.

They are big and come from npm, so they are looked for, never installed: in `EXPRESSWAY_AGENTS` (a folder of programs),
else on the path. The lane answers by what the prompt holds: a call, then a text that quotes the tool's result.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

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


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("EXPRESSWAY_AGENTS")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


async def run(
    patch: pytest.MonkeyPatch, tmp_path: Path, name: str, arguments: list[str], files: dict[str, str], **more: str
) -> tuple[str, Reader]:
    """What the agent wrote at its end. `{url}` stands for the door's address, in arguments, files and environment."""
    binary = program(name)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(SECRET)
    readers: list[Reader] = []
    generate = FakeLane.Generate

    async def answer(lane: FakeLane, request: Any, context: Any) -> AsyncIterator[Any]:
        lane.script_next(tokens=readers[0].tokens(request.prompt_ids))
        async for event in generate(lane, request, context):
            yield event

    patch.setattr(FakeLane, "Generate", answer)
    async with open_doors(
        tmp_path, lanes=1, text_from=thinking_dir(), model_name="qwen", context_tokens=1 << 20
    ) as cluster:
        readers.append(Reader(cluster, work / "note.txt"))
        url = f"http://{cluster.doors.http}"
        for place, text in files.items():
            file = home / place if not place.startswith("work/") else work / place.removeprefix("work/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("{url}", url))
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", **more}
        process = await asyncio.create_subprocess_exec(
            binary,
            *arguments,
            cwd=work,
            env={key: value.replace("{url}", url) for key, value in environment.items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(240):
                written, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return written.decode(errors="replace"), readers[0]


ASK = "What does note.txt say?"


async def test_codex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = """
model = "qwen"
model_provider = "expressway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.expressway]
name = "Expressway"
base_url = "{url}/v1"
env_key = "EXPRESSWAY_KEY"
wire_api = "responses"
"""
    written, reader = await run(
        monkeypatch,
        tmp_path,
        "codex",
        ["exec", "--skip-git-repo-check", ASK],
        {".codex/config.toml": config},
        EXPRESSWAY_KEY="none",
    )
    assert f"It says: {SECRET}" in written, written[-3000:]
    assert len(reader.prompts) >= 2


async def test_claude_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, reader = await run(
        monkeypatch,
        tmp_path,
        "claude",
        ["-p", ASK, "--model", "qwen"],
        {},
        ANTHROPIC_BASE_URL="{url}",
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="qwen",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert f"It says: {SECRET}" in written, written[-3000:]
    assert len(reader.prompts) >= 2


async def test_opencode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "expressway": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Expressway",
                "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                "models": {
                    "qwen": {
                        "name": "qwen", "reasoning": True, "interleaved": {"field": "reasoning_content"},
                        "limit": {"context": 262144, "output": 8192},
                    }
                },
            }
        },
    }  # fmt: skip
    written, reader = await run(
        monkeypatch,
        tmp_path,
        "opencode",
        ["run", "--model", "expressway/qwen", ASK],
        {"work/opencode.json": json.dumps(config)},
    )
    assert f"It says: {SECRET}" in written, written[-3000:]
    assert len(reader.prompts) >= 2
