"""Every file of these tests has a started device, in whatever order and process it runs."""

import pytest
import torch

from lanes.device import cuda


@pytest.fixture(autouse=True, scope="session")
def started():
    if torch.cuda.is_available():
        cuda.start()
