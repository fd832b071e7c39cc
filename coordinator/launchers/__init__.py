"""Launchers: how processes come to life on a host. `base` is the seam, `local` and `ray` fill it."""

from __future__ import annotations

from coordinator.host.rundir import RunDir
from coordinator.launchers.base import Launcher
from coordinator.launchers.local import LocalLauncher

NAMES = ("local", "ray")


def open_launcher(name: str, run_dir: RunDir) -> Launcher:
    """The launcher of that name, ready to spawn. LauncherError when this host cannot have it."""
    assert name in NAMES
    if name == "ray":
        from coordinator.launchers.ray import RayLauncher  # Ray is imported only where it is used: 1 s and 100 MB

        return RayLauncher(run_dir)
    return LocalLauncher()
