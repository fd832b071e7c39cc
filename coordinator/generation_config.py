"""What the model's makers recommend: the pack's `generation_config.json`, as sampling defaults and end ids.

Not here: what a client says, which always wins. Invariant: nothing that a maker wrote there keeps a server from
starting; a field that cannot be used is named in the log and ignored, and what is used is inside `limits`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from coordinator import limits
from coordinator.errors import RequestError
from coordinator.fleet.lane_view import ModelView
from coordinator.pack_file import Digests, read_pack_file
from coordinator.sampling import Defaults, Wanted, check_sampling

FILE_NAME = "generation_config.json"
PLAIN = Defaults(temperature=1.0)  # of the OpenAI API

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty")
_ANY_MODEL = ModelView("", "", b"", 1, 1, (), "", 0, 1)

_log = structlog.get_logger("generation_config")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of the HTTP door, and ids that end an answer beside the model's own."""

    defaults: Defaults = PLAIN
    end_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: Path, digests: Digests | None = None) -> GenerationConfig:
        """Of a pack; the plain one when it has none. BadPack for a file that the pack was not made with."""
        try:
            value = json.loads(read_pack_file(directory / FILE_NAME, limits.GENERATION_CONFIG_BYTES, digests))
            if not isinstance(value, dict):
                raise ValueError
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError):
            _log.warning("ignored", file=FILE_NAME, reason="no JSON object that can be read")
            return cls()
        return cls.parse(value)

    @classmethod
    def parse(cls, value: dict[str, Any]) -> GenerationConfig:
        """From the file's object; null and missing fields say nothing."""
        found: dict[str, Any] = {"temperature": PLAIN.temperature}
        for name in (*_REALS, "top_k"):
            said = value.get(name)
            if said is None:
                continue
            if isinstance(said, int if name == "top_k" else int | float) and not isinstance(said, bool):
                try:
                    said_alone: dict[str, Any] = {name: said}
                    checked = check_sampling(
                        Wanted(**said_alone), PLAIN, default_seed=0, max_tokens=1, model=_ANY_MODEL
                    )
                    found[name] = getattr(checked, name)
                    continue
                except (RequestError, OverflowError):
                    pass
            _log.warning("ignored", file=FILE_NAME, field=name)
        return cls(Defaults(**found), _end_ids(value.get("eos_token_id")))


def _end_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > limits.END_IDS or not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        _log.warning("ignored", file=FILE_NAME, field="eos_token_id")
        return ()
    return tuple(ids)
