"""What all tests share. Triton decides when it is first imported whether kernels are compiled or interpreted."""

import contextlib
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
