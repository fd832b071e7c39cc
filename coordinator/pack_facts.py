"""What a pack says about itself, so that options which cannot work with it are refused before any process starts.

Asked of `python -m shared_experts inspect` in a process of its own: this package knows no format of a pack. Not here:
what the lanes check again when they load it. Invariant: a fact that the pack does not state is None and refuses
nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import BadOption, StartFailed
from coordinator.launchers.base import module_argv
from coordinator.model_sizes import ELEMENT_BYTES
from coordinator.pack_file import MANIFEST, Digests
from coordinator.reported import reported
from coordinator.request import check_prompt

_FILE = "file."  # names of sections that are files as the checkpoint had them
INSPECT_TIMEOUT_S = 60.0  # it takes half a second; a network file system may be slow


@dataclass(frozen=True, slots=True)
class PackFacts:
    """What options are compared with."""

    context_tokens: int | None  # the most that the model holds
    vocab_size: int | None
    record_bytes: int  # of one expert
    region_bytes: int = 0  # of all experts
    dense_fp32_bytes: int = 0  # of the dense weights as a CPU lane has them
    embedding_bytes: int = 0  # of them, as the pack has it

    def check_context(self, context_tokens: int | None) -> None:
        """BadOption when the model cannot hold that many tokens."""
        if context_tokens is not None and self.context_tokens is not None and context_tokens > self.context_tokens:
            raise BadOption(f"--context: {context_tokens} tokens; the model holds at most {self.context_tokens}")

    def check_prompt(self, ids: Sequence[int], context_tokens: int | None) -> None:
        """The server's own errors for a prompt that no lane of this pack would take."""
        room = context_tokens or self.context_tokens
        check_prompt(
            ids,
            "prompt",
            context_tokens=len(ids) + 1 if room is None else room,
            vocab_size=max(ids, default=0) + 1 if self.vocab_size is None else self.vocab_size,
        )

    def cache_warning(self, budget_bytes: int) -> str | None:
        """What is to be said of an expert cache that holds no expert, unless that was asked for."""
        if not 0 < budget_bytes < self.record_bytes:
            return None
        return (
            f"--vram-budget: {budget_bytes} bytes are less than one expert ({self.record_bytes} bytes): "
            "nothing will be cached"
        )


def read_facts(pack: Path) -> PackFacts:
    """Ask; what the pack tools refuse is raised with their own code and words."""
    said = inspect_pack(pack)
    try:
        config, element = said["config"], ELEMENT_BYTES[str(said["dense_dtype"])]
        return PackFacts(
            _count(config.get("max_position_embeddings")),
            _count(config.get("vocab_size")),
            int(said["experts"]["record_bytes"]),
            int(said["experts"]["bytes"]),
            sum(int(section["bytes"]) for section in said["sections"] if section["name"] == "dense") * 4 // element,
            element * (_count(config.get("vocab_size")) or 0) * (_count(config.get("hidden_size")) or 0),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartFailed(f"`python -m shared_experts inspect` does not work: it lacks {error}") from None


def read_fingerprint(pack: Path) -> bytes:
    """Of the whole pack: equal ones serve the same model to the bit."""
    try:
        return bytes.fromhex(str(inspect_pack(pack)["fingerprint"]))
    except (KeyError, ValueError) as error:
        raise StartFailed(f"`python -m shared_experts inspect` does not work: it lacks {error}") from None


def read_digests(pack: Path) -> Digests | None:
    """Of the small files that the pack carries; None for a folder without a manifest."""
    if not (pack / MANIFEST).is_file():
        return None
    said = inspect_pack(pack)
    try:
        return {
            section["name"].removeprefix(_FILE): str(section["sha256"])
            for section in said["sections"]
            if section["name"].startswith(_FILE)
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise StartFailed(f"`python -m shared_experts inspect` does not work: it lacks {error}") from None


def inspect_pack(pack: Path) -> dict[str, Any]:
    """The object of `python -m shared_experts inspect --json`; what it refuses is raised with its code and words."""
    argv = module_argv("shared_experts", "inspect", "--json", "--", str(pack))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StartFailed(f"{pack}: cannot be inspected in {INSPECT_TIMEOUT_S:g} s") from None
    try:
        said = json.loads(done.stdout)
        if done.returncode != 0:
            raise reported(str(said["error"]["code"]), str(said["error"]["message"]))
        if not isinstance(said, dict):
            raise ValueError("not an object")
        return said
    except (ValueError, KeyError, TypeError, AttributeError):
        words = (done.stderr.strip() or "(it said nothing)").splitlines()[-1]
        raise StartFailed(f"`python -m shared_experts inspect` does not work: {words}") from None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
