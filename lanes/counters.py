"""Counters of a lane since it started: plain whole numbers, written by the engine's thread only.

Names and meaning are those of `Counters` in lane.proto. Readers get a `snapshot`; rates are theirs to derive.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_LEVELS = ("cache_used_bytes", "cache_budget_bytes", "state_used_bytes", "state_budget_bytes")


@dataclass(slots=True)
class Counters:
    """What the engine, the expert store and the expert cache count."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    windows: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_hit_bytes: int = 0
    expert_miss_bytes: int = 0
    cache_admissions: int = 0
    cache_evictions: int = 0
    cache_used_bytes: int = 0
    cache_budget_bytes: int = 0
    cancelled: int = 0
    failed: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    ngram_rows: int = 0
    ngram_cache_hits: int = 0
    ngram_prefetch_hits: int = 0
    ngram_read_bytes: int = 0
    ngram_wait_ns: int = 0
    cache_admitted_hits: int = 0
    reused_tokens: int = 0
    checkpoints: int = 0
    state_used_bytes: int = 0
    state_budget_bytes: int = 0
    parks: int = 0
    park_bytes: int = 0
    park_ns: int = 0
    restores: int = 0
    restore_ns: int = 0
    restores_refused: int = 0

    def snapshot(self) -> Counters:
        """A copy that no longer changes."""
        return replace(self)

    def restart(self) -> None:
        """Back to zero, but for sizes of the cache and of state."""
        for f in fields(self):
            if f.name not in _LEVELS:
                setattr(self, f.name, 0)

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`; sizes of the cache and of state stay as they are now."""
        return Counters(
            **{
                f.name: getattr(self, f.name) - (0 if f.name in _LEVELS else getattr(before, f.name))
                for f in fields(self)
            }
        )
