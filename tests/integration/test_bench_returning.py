"""The bench of returning conversations goes its whole way, from memory and from the pool."""

import json

from bench import returning


def test_from_memory_and_from_the_pool(tmp_path, capsys):
    out = tmp_path / "returning.json"
    options = [
        "--scale", "small", "--tokens", "600", "--vram-budget", "8MiB", "--prefill-chunk", "256", "--park", "67108864",
        "--state-budget", "64MiB", "--state-budget", "1KiB", "--repeats", "1", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    assert returning.main(options) == 0
    kept, parked = json.loads(out.read_text())["lanes"]
    assert {name: one["returns"] for name, one in kept["returned_from"].items()} == {"memory": 2}
    assert {name: one["returns"] for name, one in parked["returned_from"].items()} == {"pool": 2}
    assert (kept["restores"], parked["restores"]) == (0, 2)
    # A turn adds 24 tokens; of its answer of 8 the last one is never read.
    assert kept["read_again_tokens_max"] == parked["read_again_tokens_max"] == 0
    assert kept["restores_refused"] == parked["restores_refused"] == 0
    assert min(kept["first_token_s"].values()) > 0
    assert capsys.readouterr().out
