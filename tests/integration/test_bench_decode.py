"""`python -m bench.decode` from end to end at a test's size: every field of a result, and forced rates as asked for."""

import json
import subprocess
import sys

LIMIT_S = 600


def test_a_result_has_what_the_contract_asks_for(tmp_path):
    out = tmp_path / "decode.json"
    command = [
        sys.executable, "-m", "bench.decode", "--scale", "small", "--vram-budget", "2MiB,0",
        "--tokens", "12", "--warm", "10", "--prompt", "8", "--forced", "100,60", "--drafted", "80",
        "--drafted-at", "50,75,100", "--drafted-rounds", "2", "--draft-ids", "900", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"command", "versions", "host", "pack", "conditions"} < set(result)
    assert str(tmp_path) not in out.read_text()
    assert result["tokens_per_s"] > 0
    assert 0 < result["hit_rate"] < 1
    assert result["bound_tokens_per_s"] > result["tokens_per_s"]
    assert result["vram_budget_bytes"] == 2 << 20
    assert result["adaptive"]["follows_the_walk"] == 1
    told = result["milliseconds"]
    assert told["step"] > told["window"] > told["dense"] > 0
    assert told["handshake"] is None
    drafted = result["drafted"]
    assert list(drafted) == ["forced_50", "forced_75", "in_vram"]
    for part in drafted.values():
        assert part["not_held"] == 0
        told = part["by_injected_acceptance"]["80%"]
        assert told["guess_ms"] > 0, "the draft layer was asked"
        assert len(told["gains"]) == 2
        assert min(told["gains"]) <= told["gain"] <= max(told["gains"])
        assert told["gain_after_first"] == told["gains"][1]
        assert set(part["by_most_drafts"]) == {"80%, at most 1", "80%, at most 2"}
        assert [size["rows"] for size in part["by_rows"]] == sorted(size["rows"] for size in part["by_rows"])
        assert all(size["distinct_experts"] > size["distinct_misses"] for size in part["by_rows"])
        assert part["by_rows"][-1]["rows"] > 2, "windows had drafts, all right"
    # Where drafts are right so often, some of the short stretches found that they pay.
    kinds = ("by_injected_acceptance", "by_most_drafts")
    stretches = [stretch for part in drafted.values() for kind in kinds for stretch in part[kind].values()]
    assert max(stretch["tokens_per_pass"] for stretch in stretches) > 1
    assert "windows of 4: {" in done.stderr, "what was found is told at once"
    assert drafted["in_vram"]["by_rows"][0]["hit_rate"] == 1
    # Counted are the last tokens, held are the hottest experts of all.
    assert 0.65 < drafted["forced_75"]["by_rows"][0]["hit_rate"] < 1
    (without,) = result["other_budgets"]
    assert (without["hit_rate"], without["cache"]["replayed"]) == (0, None)
    assert [point["forced"] for point in result["forced"]] == [True, True]
    for point, rate in zip(result["forced"], (0.6, 1.0), strict=True):
        assert point["not_held"] == 0
        assert abs(point["hit_rate"] - rate) < (0.05 if rate < 1 else 1e-9)
