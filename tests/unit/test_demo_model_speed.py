"""What makes the demo model's training fast is used only where it computes what the slow way computes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deploy.demo_model.compiled import KINDS, compile_parts, uncompiled
from deploy.demo_model.group import ALONE, Group
from deploy.demo_model.model.deltanet import DeltaNet
from deploy.demo_model.model.network import Network
from deploy.demo_model.sizes import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")
TWO_PROCESSES = """
import sys, torch
from deploy.demo_model.group import Group
group = Group.joined()
p = torch.nn.Parameter(torch.zeros(3))
unused = torch.nn.Parameter(torch.zeros(2))
p.grad = torch.arange(3.0) + 10 * group.rank
group.average([p, unused])
said = group.first(0.5 + group.rank, 7.0)
with open(f"{sys.argv[1]}/{group.rank}", "w") as file:
    file.write(f"{p.grad.tolist()} {unused.grad} {said} {group.share(6)} {group.leads}")
group.leave()
"""


class Wrong(torch.autograd.Function):
    """What it is given, with a gradient ten times too long."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 10 * grad


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network(SMALL)


def compiling(monkeypatch, wrong: type) -> None:
    """A compiler that gets the gradients of one kind wrong, while its answers are right."""

    def compile(self, dynamic):
        def call(*args):
            out = self.forward(*args)
            return Wrong.apply(out) if isinstance(self, wrong) else out

        self._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile)


def test_a_kind_whose_compiled_gradients_are_wrong_stays_as_it_is(network, monkeypatch):
    compiling(monkeypatch, DeltaNet)
    said = []
    compile_parts(network, lambda: network(torch.randint(1, 512, (2, 96))), said.append)
    assert [(line["compiled"], line["used"]) for line in said] == [(k.__name__, k is not DeltaNet) for k in KINDS]
    for module in network.model.layers.modules():
        assert (module._compiled_call_impl is not None) == (
            isinstance(module, KINDS) and not isinstance(module, DeltaNet)
        )
    assert all(p.grad is None for p in network.parameters())


def test_a_compiler_that_fails_stops_nothing(network, monkeypatch):
    def compile(self, dynamic):
        def call(*args):
            raise RuntimeError("no compiler here")

        self._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    said = []
    compile_parts(network, lambda: network(torch.randint(1, 512, (2, 96))), said.append)
    assert [line["used"] for line in said if "used" in line] == [False] * len(KINDS)
    assert network(torch.randint(1, 512, (1, 16))).x.isfinite().all()


def test_uncompiled_puts_back_what_was_compiled(network, monkeypatch):
    compiling(monkeypatch, type(None))
    compile_parts(network, lambda: network(torch.randint(1, 512, (2, 96))), lambda line: None)
    before = [m._compiled_call_impl for m in network.modules()]
    with uncompiled(network):
        assert not any(m._compiled_call_impl for m in network.modules())
    assert [m._compiled_call_impl for m in network.modules()] == before


def test_two_processes_share_a_mean_and_the_firsts_word(tmp_path):
    launch = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--standalone",
        "--no-python",
    )
    root = Path(__file__).parents[2]
    argv = [sys.executable, *launch, sys.executable, "-c", TWO_PROCESSES, str(tmp_path)]
    subprocess.run(argv, check=True, cwd=root, timeout=300, capture_output=True)
    assert (tmp_path / "0").read_text() == "[5.0, 6.0, 7.0] None [0.5, 7.0] 3 True"
    assert (tmp_path / "1").read_text() == "[5.0, 6.0, 7.0] None [0.5, 7.0] 3 False"


def test_alone_nothing_is_shared():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    ALONE.average([p])
    assert p.grad.tolist() == [1.0, 1.0]
    assert ALONE.first(1.5) == [1.5]
    with pytest.raises(ValueError, match="5 sequences over 2 processes"):
        Group(0, 2).share(5)
