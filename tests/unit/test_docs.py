"""The guide holds together: every link leads somewhere, every page is reached, every command line is one."""

import re
import shlex
from pathlib import Path

import click
import pytest

from coordinator.cli import COMMANDS, commands

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench/LOG.md"])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As a forge makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return LINK.findall(re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_a_broken_link_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](b.md) `[c](d)`\n```\n[e](f)\n```\n")
    assert links(page) == ["b.md"]
    assert anchors(page) == {"a-title"}


def test_every_page_of_the_guide_is_reached_from_its_index():
    index = ROOT / "docs/index.md"
    reached, left = set(), [index]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link]
        left += [target for target in targets if target.suffix == ".md" and target.exists()]
    assert [str(page) for page in sorted((ROOT / "docs").glob("*.md")) if page not in reached] == []


def command_lines() -> list[list[str]]:
    """Every `expressway …` in a shell block of any page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"(?:^|&& |/bin/)expressway +(\S.*)$", line.split(" #")[0]):
                    found.append([str(page.name), *shlex.split(match[1])])
    return found


def test_every_command_line_of_the_pages_is_one():
    lines = command_lines()
    assert len(lines) > 15
    for page, name, *words in lines:
        assert name in COMMANDS, (page, name)
        command = commands.get_command(click.Context(commands), name)
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        if name == "bench" or isinstance(command, click.Group):
            continue  # what follows is the action's own
        unknown = [w for w in words if w.startswith("--") and w.strip("[]").partition("=")[0].strip("]") not in known]
        assert unknown == [], (page, name, words)


def test_every_command_of_bench_in_the_pages_is_one():
    from bench.__main__ import main

    text = "\n".join(page.read_text() for page in PAGES)
    for action, words in re.findall(r"expressway bench (run|compare)([^`\n#]*)", text):
        known = {option for param in main.commands[action].params for option in (*param.opts, *param.secondary_opts)}
        known |= {"--help", "--cluster"}
        assert set(re.findall(r"--[a-z-]+", words)) <= known, words
