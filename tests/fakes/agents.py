"""Coding agents, headless, pointed at a server: how each is set up and run.

They are big and come from npm, so they are looked for, never installed: in `EXPRESSWAY_AGENTS` (a folder of programs),
else on the path.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CODEX = """
model = "{model}"
model_provider = "expressway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.expressway]
name = "Expressway"
base_url = "{url}/v1"
env_key = "EXPRESSWAY_KEY"
wire_api = "responses"
"""
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "expressway": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Expressway",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {
                "{model}": {
                    "name": "{model}", "reasoning": True, "interleaved": {"field": "reasoning_content"},
                    "limit": {"context": 262144, "output": 8192},
                }
            },
        }
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agent:
    """`{url}`, `{model}` and `{ask}` stand for themselves everywhere; files lie in home, or in `work/`."""

    program: str
    arguments: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


AGENTS = {
    "codex": Agent(
        "codex",
        ("exec", "--skip-git-repo-check", "{ask}"),
        {".codex/config.toml": CODEX},
        {"EXPRESSWAY_KEY": "none"},
    ),
    "claude": Agent(
        "claude",
        ("-p", "{ask}", "--model", "{model}"),
        {},
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        "opencode",
        ("run", "--model", "expressway/{model}", "{ask}"),
        {"work/opencode.json": json.dumps(OPENCODE)},
    ),
}


def program(name: str) -> str:
    """Where it is; the test is skipped when it is nowhere."""
    found = shutil.which(name, path=os.environ.get("EXPRESSWAY_AGENTS")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


async def headless(
    agent: Agent, folder: Path, *, url: str, model: str, ask: str, limit_s: float, **more: str
) -> tuple[int | None, str]:
    """Its exit code, and all that it wrote. It works in `folder`/work, which may be there."""
    binary = program(agent.program)
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir(exist_ok=True)

    def filled(text: str) -> str:
        return text.replace("{url}", url).replace("{model}", model).replace("{ask}", ask)

    for place, text in agent.files.items():
        file = work / place.removeprefix("work/") if place.startswith("work/") else home / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(filled(text))
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", **agent.environment, **more}
    process = await asyncio.create_subprocess_exec(
        binary,
        *map(filled, agent.arguments),
        cwd=work,
        env={key: filled(value) for key, value in environment.items()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            written, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, written.decode(errors="replace")
