"""Which chat format a pack's model was trained on, told from its own chat template's text; the template is never run.

Not here: how a format is written (renderer). Invariant: nothing that a maker wrote there keeps a server from
starting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coordinator import limits
from coordinator.pack_file import Digests, read_pack_file

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """ChatML, with or without a reasoning block that the prompt opens, with or without words for its effort."""

    thinks: bool = False
    says_effort: bool = False

    @classmethod
    def of(cls, template: str) -> ChatFormat:
        """Of a template's text."""
        thinks = "<think>" in template
        return cls(thinks, thinks and "reasoning_effort" in template)

    @classmethod
    def load(cls, directory: Path, digests: Digests | None = None) -> ChatFormat:
        """Of a pack; the plain format when it has no template. BadPack for a file that the pack was not made with."""
        try:
            return cls.of(read_pack_file(directory / TEMPLATE_FILE, limits.CHAT_TEMPLATE_BYTES, digests).decode())
        except (OSError, ValueError):
            pass
        try:
            config = json.loads(read_pack_file(directory / CONFIG_FILE, limits.CHAT_TEMPLATE_BYTES, digests))
            template = config.get("chat_template") if isinstance(config, dict) else None
            return cls.of(template) if isinstance(template, str) else cls()
        except (OSError, ValueError, RecursionError):
            return cls()
