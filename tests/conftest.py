"""What all tests share. Triton decides when it is first imported whether kernels are compiled or interpreted."""

import contextlib
import errno
import functools
import os
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # a bare GPU host; tests/gpu draws no examples
    from hypothesis import HealthCheck, settings

    # A loaded machine is slow, and that is no finding: what bounds a test in time is pytest's own limit.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def one_thread():
    """Test workers share the cores: torch computes on one, and as before afterwards."""
    import torch  # not every test wants it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def large_tiles(monkeypatch, pack):
    """Kernels of the test's `pack` have few large programs: of the interpreter's time most goes into their number."""
    from tests.fakes.large_tiles import widened  # with kernels, which not every test wants

    widened(monkeypatch, pack.manifest.experts.layout)


@pytest.fixture
def unwritten(monkeypatch):
    """What torch gives out without contents is full of NaN, or of numbers that are no place: who reads it is seen."""
    import torch

    def filled(make):
        @functools.wraps(make)
        def made(*given, **options):
            tensor = make(*given, **options)
            if tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))
            elif not tensor.dtype.is_complex and tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture
def refuse_direct(monkeypatch):
    """A call, after which no file opens for direct reads any more."""
    true_open = os.open

    def opened(name, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true_open(name, flags, *rest)

    return lambda: monkeypatch.setattr(os, "open", opened)
