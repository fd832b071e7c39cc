"""The page of promises names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists():
    page = (ROOT / "THREAT_MODEL.md").read_text()
    paths = set(re.findall(r"tests/[\w/*]+\.py", page))
    names = set(re.findall(r"\btest_\w+(?=`)", page))
    assert len(paths) > 10
    assert len(names) >= 8
    assert [path for path in paths if not list(ROOT.glob(path))] == []
    text = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in text] == []


def test_the_numbers_of_hostile_files_are_right():
    from tests.unit import test_checkpoint_hostile, test_pack_hostile

    page = (ROOT / "THREAT_MODEL.md").read_text()
    checkpoints = len(test_checkpoint_hostile.CASES) + len(test_checkpoint_hostile.INDEX_CASES)
    assert f"{checkpoints} hand-made checkpoints in" in page
    assert f"{len(test_pack_hostile.CASES)} packs in" in page
