"""What a bench was asked for, looked at before a model is made for it: that takes minutes, and a GPU host's time.

Not here: what the options mean. Invariant: nothing here starts a device or loads torch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from lanes.config import parse_bytes, parse_cores

LIBRARY = "libcuda.so.1"


def percents(text: str) -> list[float]:
    """Shares of a list such as 75,100; none of an empty one."""
    try:
        found = [int(one) for one in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole percents, such as 75,100") from None
    if not all(0 <= one <= 100 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r}: percents are from 0 to 100")
    return [one / 100 for one in found]


def _as_lanes_read_it(read: Callable[[str], object], text: str) -> str:
    try:
        read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def size(text: str) -> str:
    """A size that a lane will take, as it was written."""
    return _as_lanes_read_it(parse_bytes, text)


def sizes(text: str) -> list[str]:
    """Some of them, such as 16GiB,24GiB."""
    return [size(one) for one in text.split(",")]


def cores(text: str) -> str:
    """A list of cores that a lane will take, as it was written."""
    return _as_lanes_read_it(lambda given: parse_cores(given, frozenset(os.sched_getaffinity(0))), text)


def device(text: str) -> str:
    """`cuda` only where there is a driver and torch is not its CPU build; what else a lane needs, its start says."""
    if text != "cuda":
        return text
    try:
        built = version("torch")
    except PackageNotFoundError:
        raise argparse.ArgumentTypeError("there is no torch here") from None
    if built.endswith("+cpu"):
        raise argparse.ArgumentTypeError(f"this torch ({built}) is built for the CPU; install its CUDA build")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise argparse.ArgumentTypeError(f"no CUDA driver ({LIBRARY}); look at `nvidia-smi`") from None
    return text
