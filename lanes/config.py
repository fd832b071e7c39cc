"""The lane's configuration: read once from the command line, checked, frozen, passed on by constructor.

Not here: whether the files exist (start-up opens them and says so).
Invariant: a `LaneConfig` has every number in its range; a `ConfigError` names the option and the range.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NoReturn, TypeVar

from lanes import limits
from lanes.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
_MAX_BUDGET_BYTES = 1 << 40
_ISAS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """What one lane process was told."""

    owner: Path
    pack: Path
    device: str
    listen: Path  # of the Unix socket
    region_socket: Path  # where this lane hands the region's descriptor to an owner's successor
    vram_budget_bytes: int
    state_budget_bytes: int  # for conversations that wait, beside the one that runs
    park: Path | None  # the park pool's socket
    kv_int8: bool  # keys and values in a byte each, which is approximate
    ngram_cache_bytes: int  # host memory for rows of n-gram tables
    cores: tuple[int, ...]
    pinned: bool  # threads stay on one core each: only when the cores were named, so that lanes never share one unasked
    name: str
    context_tokens: int | None  # None: the model's own, at most DEFAULT_CONTEXT_TOKENS
    prefill_chunk_rows: int | None  # None: chosen at the start
    prefill_routing: str  # "exact", or "vram": prompt tokens choose among the experts in the cache
    draft_vocabulary: Path | None  # None: the draft layer may name every id
    drafts: int | None  # most of a round; None: MAX_DRAFTS where the pack has a draft layer, else 0
    expert_isa: str | None  # None: the best this CPU has
    trace_routing: Path | None
    profiles: Path | None  # folder of profiles of hot experts
    log_json: bool

    @property
    def approximations(self) -> tuple[str, ...]:
        """What this lane computes less exactly: every answer is labelled with these."""
        chosen = {"kv-int8": self.kv_int8, "prefill-routing-vram": self.prefill_routing == "vram"}
        return tuple(name for name, on in chosen.items() if on)


def parse_bytes(text: str) -> int:
    """A size such as 0, 4096, 512MiB, 1.5GiB or 2GB."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if size > _MAX_BUDGET_BYTES:
        raise ValueError(f"{text!r} is more than 1TiB")
    return size


def parse_cores(text: str, allowed: frozenset[int]) -> tuple[int, ...]:
    """A list such as 0-3,5: ascending, without repeats, each of them in `allowed`."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip(), re.ASCII)
        if not match:
            raise ValueError(f"{text!r} is not a list of cores; write for example 0-3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        cores.update(range(first, last + 1))
    if missing := sorted(cores - allowed):
        raise ValueError(f"core {missing[0]} is not one that this process may use ({_ranges(sorted(allowed))})")
    return tuple(sorted(cores))


def parse(argv: Sequence[str], environ: Mapping[str, str], allowed_cores: frozenset[int]) -> LaneConfig:
    """The configuration of a command line; raises ConfigError. `--help` prints and exits as usual."""
    options = _parser(allowed_cores).parse_args(argv)
    isa = environ.get("EXPERT_ISA") or None
    if isa is not None and isa not in _ISAS:
        raise ConfigError(f"EXPERT_ISA: {isa!r} is not one of {', '.join(_ISAS)}")
    if options.device == "cuda" and options.kv == "int8":
        raise ConfigError("--kv: 'int8' is for lanes on the cpu")
    listen: Path = options.listen
    return LaneConfig(
        owner=options.owner,
        pack=options.pack,
        device=options.device,
        listen=listen,
        region_socket=options.region_socket or listen.with_name(f"{options.name}.region.sock"),
        vram_budget_bytes=options.vram_budget,
        state_budget_bytes=options.state_budget,
        park=options.park,
        kv_int8=options.kv == "int8",
        ngram_cache_bytes=options.ngram_cache,
        cores=options.cores or tuple(sorted(allowed_cores)),
        pinned=options.cores is not None,
        name=options.name,
        context_tokens=options.context,
        prefill_chunk_rows=options.prefill_chunk,
        prefill_routing=options.prefill_routing,
        drafts=options.drafts,
        draft_vocabulary=options.draft_vocab,
        expert_isa=isa,
        trace_routing=options.trace_routing,
        profiles=options.profiles,
        log_json=options.log_json,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parser(allowed_cores: frozenset[int]) -> _Parser:
    parser = _Parser(prog="python -m lanes", description="One lane: tokens in, tokens out.", allow_abbrev=False)
    add = parser.add_argument
    add("--owner", required=True, type=_socket_path, metavar="SOCKET", help="the region owner's socket")
    add("--pack", required=True, type=Path, metavar="DIR", help="the packed model")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the dense layers run (default: cpu)")
    add("--listen", required=True, type=_listen, metavar="unix:PATH", help="where to serve")
    add("--vram-budget", required=True, type=_checked(parse_bytes), metavar="BYTES",
        help="cpu: size of the private expert cache, 0 keeps no expert; cuda: all GPU memory of the lane")  # fmt: skip
    add("--state-budget", type=_checked(parse_bytes), metavar="BYTES", default=limits.DEFAULT_STATE_BYTES,
        help="memory for conversations that wait, beside the one that runs (default: 512MiB)")  # fmt: skip
    add("--park", type=_socket_path, metavar="SOCKET",
        help="the socket of the host's pool for conversations that left a lane's memory (default: none)")  # fmt: skip
    add("--kv", choices=("exact", "int8"), default="exact",
        help="how keys and values of tokens are kept; int8 takes half of bf16's memory, a quarter of fp32's, and is "
             "approximate: every answer says so (default: exact)")  # fmt: skip
    add("--ngram-cache", type=_checked(parse_bytes), metavar="BYTES", default=limits.DEFAULT_NGRAM_CACHE_BYTES,
        help="memory for rows of n-gram tables that were read (default: 64MiB)")  # fmt: skip
    add("--cores", type=_checked(lambda text: parse_cores(text, allowed_cores)), metavar="LIST",
        help="CPU cores to use, for example 0-3,5 (default: all allowed)")  # fmt: skip
    add("--name", default="lane-0", type=_name, help="name of this lane (default: lane-0)")
    add("--context", type=_whole(2, 1 << 20), metavar="TOKENS",
        help=f"prompt and output together (default: the model's, at most {limits.DEFAULT_CONTEXT_TOKENS})")  # fmt: skip
    add("--prefill-chunk", type=_whole(1, limits.MAX_PREFILL_CHUNK_ROWS), metavar="N",
        help=f"prompt rows per window (default: {limits.DEFAULT_PREFILL_CHUNK_ROWS}; on a GPU by the link's rate, "
             "as far as memory allows)")  # fmt: skip
    add("--prefill-routing", choices=("exact", "vram"), default="exact",
        help="vram: approximate, for experts that are slow to reach: while a prompt is read, tokens choose among the "
             "experts in the cache (default: exact)")  # fmt: skip
    add("--drafts", type=_whole(0, limits.MAX_DRAFTS), metavar="N",
        help=f"tokens guessed ahead of a pass, at most; 0: none, and repeats are then equal to the bit "
             f"(default: {limits.MAX_DRAFTS} where the pack has a draft layer)")  # fmt: skip
    add("--draft-vocab", type=Path, metavar="FILE",
        help="ids that the draft layer may name, as `expressway draft-vocab` writes them (default: all)")  # fmt: skip
    add("--region-socket", type=_socket_path, metavar="PATH",
        help="where to hand on the region's descriptor (default: NAME.region.sock beside --listen)")  # fmt: skip
    add("--trace-routing", type=Path, metavar="PLACE",
        help="write a new file (or into a folder) with the experts that every window used; never tokens")  # fmt: skip
    add("--profiles", type=Path, metavar="DIR",
        help="where lanes keep which experts they used, so that a cache begins with those (default: none)")  # fmt: skip
    add("--log-json", action="store_true", help="log JSON lines instead of text")
    return parser


def _checked(parse_value: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that keeps the message of a ValueError."""

    def check(text: str) -> T:
        try:
            return parse_value(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


def _whole(least: int, most: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return check


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 32 of a-z, 0-9 and -")
    return text


def _socket_path(text: str) -> Path:
    size = len(os.fsencode(text))
    if not 1 <= size <= limits.MAX_SOCKET_PATH_BYTES or "\0" in text:
        raise argparse.ArgumentTypeError(f"a socket path has 1 to {limits.MAX_SOCKET_PATH_BYTES} bytes, not {size}")
    return Path(text).absolute()


def _listen(text: str) -> Path:
    if not text.startswith("unix:"):
        raise argparse.ArgumentTypeError(f"{text!r} does not start with 'unix:'; a lane listens on a Unix socket only")
    return _socket_path(text.removeprefix("unix:"))


def _ranges(cores: Sequence[int]) -> str:
    """0,1,2,3,5 as 0-3,5."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
