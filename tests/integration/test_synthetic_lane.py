"""A lane loads a synthetic model as any other; it is finite to the last of 48 layers and says what it was made for."""

import pytest

from bench.own_lane import started
from bench.synthetic import measure
from bench.synthetic.pack import made
from bench.synthetic.shape import SHAPES

PROMPT = 40


def where(run, pack):
    """The options that say where things lie."""
    return ["--owner", f"{run}/owner.sock", "--pack", str(pack), "--listen", f"unix:{run}/lane.sock"]


def ask(tmp_path, shape, tokens, *options):
    """The answer, and what it should be."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with (
        made(tmp_path / "pack", shape) as synthetic,
        synthetic.lend(run / "owner.sock"),
        started([*where(run, synthetic.folder), "--context", "512", "--drafts", "0", *options]) as lane,
    ):
        answered = lane.ask(synthetic.walk.stretch(7, PROMPT), tokens)
        assert len(answered.steps_ns) == tokens - 1 == answered.decode.generated_tokens - 1
        return answered.ids, synthetic.walk.stretch(7 + PROMPT, tokens)


@pytest.mark.usefixtures("one_thread")
def test_the_answer_is_the_walk_and_experts_are_used_unevenly(tmp_path):
    shape, trace = SHAPES["small"], tmp_path / "routing.trace"
    ids, wanted = ask(tmp_path, shape, 60, "--vram-budget", "1MiB", "--trace-routing", str(trace))
    assert ids == wanted
    layers, experts, keys = measure.decode_keys(trace)
    assert (layers, experts, len(keys)) == (16, 64, 59)
    assert all(len(window) == 16 * 6 for window in keys)
    # 6 of 64 experts a token: far from the 0.1 of even use, below what a model with 10 of 512 shows
    assert 0.3 < measure.skew(keys, layers * experts) < 0.7


@pytest.mark.usefixtures("one_thread")
def test_48_layers_stay_finite_and_keep_the_token(tmp_path):
    ids, wanted = ask(tmp_path, SHAPES["small"].changed(layers=48, experts=16), 12, "--vram-budget", "0")
    assert ids == wanted
