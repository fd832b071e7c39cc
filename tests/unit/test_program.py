"""The version of a program that runs from its sources."""

import importlib.metadata

from shared_experts import program


def test_a_program_that_is_not_installed_says_so(monkeypatch):
    assert program.version() == importlib.metadata.version("expressway")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert program.version() == program.UNINSTALLED
