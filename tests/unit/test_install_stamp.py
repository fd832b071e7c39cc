"""`scripts/install` runs again exactly when something that an installation depends on has changed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("lanes/native", "shared_experts/native", "shared_experts/native_rows")


@pytest.fixture
def tree(tmp_path):
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts" / "install")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def stamp(tree: Path) -> str:
    done = subprocess.run([tree / "scripts" / "install", "--stamp"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_the_same_tree_has_the_same_stamp(tree):
    assert len(stamp(tree).strip()) == 16
    assert stamp(tree) == stamp(tree)


def test_a_built_library_does_not_count(tree):
    before = stamp(tree)
    (tree / "lanes/native/libexperts.cpython-311-x86_64-linux-gnu.so").write_bytes(bytes(range(256)) * 100)
    assert stamp(tree) == before


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", *(f"{folder}/*.cpp" for folder in SOURCES)])
def test_a_changed_source_counts(tree, name):
    before = stamp(tree)
    path = sorted(tree.glob(name))[0]
    path.write_text(path.read_text() + "\n")
    assert stamp(tree) != before
