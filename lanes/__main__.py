"""`python -m lanes`: reads the configuration, sets what must be set before torch is loaded, runs the lane.

Invariant: nothing here imports torch before the process's environment is final.
"""

from __future__ import annotations

import os
import resource
import sys

from lanes.config import parse
from lanes.errors import EXIT_CONFIG, ConfigError


def main(argv: list[str] | None = None) -> int:
    """Runs a lane and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        from lanes.version import report

        print(report())
        return 0
    if len(argv) == 2 and argv[0] == "--golden":
        _prepare(tuple(sorted(os.sched_getaffinity(0))))
        from lanes.golden import main as golden

        return golden(argv[1])
    try:
        config = parse(argv, os.environ, frozenset(os.sched_getaffinity(0)))
    except ConfigError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    _prepare(config.cores, gpu=config.device == "cuda")
    from lanes.process import run

    return run(config)


def _prepare(cores: tuple[int, ...], *, gpu: bool = False) -> None:
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    os.sched_setaffinity(0, cores)  # every thread from here on inherits it
    # Helpers of torch that wait for work must sleep: spinning, they take the cores from kernel and neighbours.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


if __name__ == "__main__":
    sys.exit(main())
