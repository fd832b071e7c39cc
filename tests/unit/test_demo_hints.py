"""What the demo says at its end can be copied, whatever the terminal's width."""

import io
import json
import shlex

from rich.console import Console

from bench.demo import show_hints


def test_commands_stay_whole_on_a_narrow_terminal():
    out = io.StringIO()
    show_hints(Console(file=out, width=40), "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    said = out.getvalue()
    assert "http://127.0.0.1:3" in said
    words = shlex.split(said[said.index("curl") : said.index(".venv")])
    assert words[words.index("-H") + 1] == "content-type: application/json"
    assert json.loads(words[words.index("-d") + 1])["messages"]
    assert all(
        len(line) > 40
        for line in said.splitlines()
        if line.strip().startswith(("curl", "-d", ".venv/bin/expressway generate"))
    )
