"""The bench of conversations goes its whole way on a synthetic model whose owner it is."""

import json

import pytest

from bench import conversations


def test_on_a_synthetic_model(tmp_path, capsys):
    out = tmp_path / "conversations.json"
    options = [
        "--scale", "small", "--vram-budget", "8MiB", "--root", "300", "--turns", "3", "--added", "100", "--counts", "1",
        "2", "--context", "1024", "--state-budget", "400000", "--park", "67108864", "--out", str(out),
    ]  # fmt: skip
    assert conversations.main(options) == 0
    found = json.loads(out.read_text())
    assert found["cross_lane_resume_equal"] is True
    assert found["reread_excess_tokens_max"] <= 64
    assert [one["conversations"] for one in found["per_lane"]] == [1, 2]
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize("wrong", [["--device", "cuda"], ["--cores", "0"]])
def test_what_cannot_be_is_said_at_once(wrong, capsys):
    with pytest.raises(SystemExit):
        conversations.parsed(wrong)
    assert "must be given" in (said := capsys.readouterr().err) or "needs --scale" in said
