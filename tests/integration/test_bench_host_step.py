"""The bench of the host's path between windows: on a small vocabulary, and what it shows of the order of a step."""

import dataclasses

import pytest
import triton

from bench import host_step
from lanes.outbox import Outbox

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here")


def test_a_window_is_launched_before_its_token_is_sent_and_counted(tmp_path, monkeypatch):
    order = []

    def noted(owner, name, says):
        real = getattr(owner, name)

        def told(self, *given):
            order.append(says)
            return real(self, *given)

        monkeypatch.setattr(owner, name, told)

    noted(host_step.Device, "run_part", "launch")
    noted(host_step.Device, "wait", "wait")
    noted(Outbox, "put", "send")
    noted(host_step.GpuExperts, "think", "think")
    noted(host_step.GpuExperts, "end_window", "end")
    monkeypatch.setattr(host_step, "LAYERS", 4)
    monkeypatch.setattr(host_step, "EXPERTS", 32)
    sizes = dataclasses.replace(host_step.SIZES, vocab_size=512)
    figures = host_step.measure(tmp_path, 12, 1e-3, sizes)
    assert all(us > 0 for us in figures.values())
    launch = ["launch"] * 4  # its parts
    assert order[:8] == [*launch, "think", "wait", "end", "wait"], "the prompt's, and its checkpoint's"
    for at in range(11):
        assert order[8 + 8 * at :][:8] == [*launch, "send", "think", "wait", "end"]
    assert order.count("send") == 12


def test_a_draft_layer_guesses_and_windows_have_its_drafts(tmp_path, monkeypatch):
    guessed, real = [], host_step.Device._guess
    monkeypatch.setattr(host_step.Device, "_guess", lambda self, *a, **b: guessed.append(a) or real(self, *a, **b))
    monkeypatch.setattr(host_step, "LAYERS", 4)
    monkeypatch.setattr(host_step, "EXPERTS", 32)
    sizes = dataclasses.replace(host_step.SIZES, vocab_size=512)
    figures = host_step.measure(tmp_path, 30, 1e-3, sizes, drafts=True)
    assert guessed
    assert 0 < figures["first_us"] <= figures["between_us"]
