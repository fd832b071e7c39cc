"""Kernels run in memory where nothing is zero by chance: a GPU's new memory has whatever was there before."""

import pytest


@pytest.fixture(autouse=True)
def every_test(unwritten):
    """Of this folder."""
