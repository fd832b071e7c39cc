"""What every lane of a cluster is told, whoever starts it. A value; words in (the command line), words out (a lane's).

Not here: what differs from lane to lane (plan). Invariant: what was not asked for is not said, so that a lane's own
default holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Options of `python -m lanes` that all lanes share. None: the lane's own default."""

    pack: Path
    device: str
    vram_budget_bytes: int
    context_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    prefill_routing: str | None = None
    state_budget_bytes: int | None = None
    ngram_cache_bytes: int | None = None
    kv: str | None = None  # "exact" or "int8": how keys and values are kept
    drafts: int | None = None
    draft_vocabulary: Path | None = None  # an absolute path
    trace_folder: Path | None = None  # an absolute path; every lane that starts writes a new file into it
    log_json: bool = False

    def alike(self) -> dict[str, str]:
        """What every host of a cluster must say alike, as words: a conversation may go on at any lane, and what it is
        told, or whether it fits, must not depend on which. The rest changes speed."""
        return {
            "--context": str(self.context_tokens or "the model's"),
            "--prefill-routing": self.prefill_routing or "exact",
            "--kv": self.kv or "exact",
            "--drafts": "the pack's" if self.drafts is None else str(self.drafts),
        }

    def argv(self) -> tuple[str, ...]:
        """As words of a command line."""
        said = {
            "--pack": self.pack,
            "--device": self.device,
            "--vram-budget": self.vram_budget_bytes,
            "--context": self.context_tokens,
            "--prefill-chunk": self.prefill_chunk_tokens,
            "--prefill-routing": self.prefill_routing,
            "--state-budget": self.state_budget_bytes,
            "--ngram-cache": self.ngram_cache_bytes,
            "--kv": self.kv,
            "--drafts": self.drafts,
            "--draft-vocab": self.draft_vocabulary,
            "--trace-routing": self.trace_folder,
        }
        words = [word for name, value in said.items() if value is not None for word in (name, str(value))]
        return (*words, *(("--log-json",) if self.log_json else ()))
