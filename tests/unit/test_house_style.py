"""What a reader of any file may rely on: size, an opening docstring, one place for the environment, nothing unsafe."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "coordinator", "deploy/demo_model", "lanes", "shared_experts")
MAX_LINES = 400

BANNED_IMPORTS = {
    "cloudpickle", "dill", "jinja2", "marshal", "pickle", "shelve", "yaml", "requests", "urllib.request",
    "multiprocessing.shared_memory",
}  # fmt: skip
BANNED_CALLS = {"eval", "exec", "compile", "torch.load", "os.system", "os.popen", "tempfile.mktemp"}


def shipped_files() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *PACKAGES], cwd=ROOT, capture_output=True, text=True
    )
    if names.returncode:  # not a checkout: an unpacked archive
        return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    return sorted(ROOT / n for n in names.stdout.split("\n") if n.endswith(".py") and (ROOT / n).exists())


def called_name(node: ast.Call) -> str:
    parts: list[str] = []
    at: ast.expr = node.func
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return ".".join(reversed([*parts, at.id])) if isinstance(at, ast.Name) else ""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in shipped_files()}


def test_files_are_found(trees):
    assert len(trees) > 30


def test_no_file_is_longer_than_the_cap():
    long = {str(p.relative_to(ROOT)): n for p in shipped_files() if (n := p.read_text().count("\n")) > MAX_LINES}
    assert long == {}


def test_every_module_says_what_it_is(trees):
    silent = [name for name, tree in trees.items() if tree.body and ast.get_docstring(tree) is None]
    assert silent == []


def test_nothing_unsafe_is_imported_or_called(trees):
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{name}: import {a.name}" for a in node.names if a.name in BANNED_IMPORTS]
            elif isinstance(node, ast.ImportFrom) and node.module in BANNED_IMPORTS:
                found.append(f"{name}: from {node.module}")
            elif isinstance(node, ast.Call) and called_name(node) in BANNED_CALLS:
                found.append(f"{name}: {called_name(node)}()")
            elif isinstance(node, ast.keyword) and node.arg == "shell":
                found.append(f"{name}: shell=")
    assert found == []


def test_ray_is_imported_by_one_file(trees):
    importers = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(m.split(".")[0] == "ray" for m in modules):
                importers.add(name)
    assert importers == {"coordinator/launchers/ray.py"}


def test_no_wildcard_address_is_bound():
    assert [str(p) for p in shipped_files() if "0.0.0.0" in p.read_text() and p.name != "addresses.py"] == []


def test_scripts_run():
    for script in ("install", "demo", "test", "check", "fuzz", "gen-proto"):
        assert (ROOT / "scripts" / script).stat().st_mode & 0o111, script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
