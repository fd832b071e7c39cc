"""Counters of a lane since it started: plain whole numbers, written by the engine's thread only.

Names and meaning are those of `Counters` in lane.proto. Readers get a `snapshot`; rates are theirs to derive.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

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
    visits: int = 0
    prompt_choices: int = 0
    replaced_choices: int = 0
    expert_cpu_bytes: int = 0
    ahead_tokens: int = 0
    window_tokens: int = 0
    streamed_bytes: int = 0
    streaming_ns: int = 0
    stream_wait_ns: int = 0
    decode_windows: int = 0
    drafts_at_1: int = 0
    drafts_at_2: int = 0
    drafts_at_3: int = 0
    drafts_right_at_1: int = 0
    drafts_right_at_2: int = 0
    drafts_right_at_3: int = 0

    def drafts(self, rows: int, right: int) -> None:
        """A decode window of 1 + `rows` rows, the first `right` of its drafts right; all were computed."""
        self.decode_windows += 1
        self.drafts_at_1 += rows > 0
        self.drafts_at_2 += rows > 1
        self.drafts_at_3 += rows > 2
        self.drafts_right_at_1 += right > 0
        self.drafts_right_at_2 += right > 1
        self.drafts_right_at_3 += right > 2

    @property
    def draft_tokens(self) -> int:
        """Drafts that were checked."""
        return self.drafts_at_1 + self.drafts_at_2 + self.drafts_at_3

    @property
    def right_draft_tokens(self) -> int:
        """Drafts that the answers have."""
        return self.drafts_right_at_1 + self.drafts_right_at_2 + self.drafts_right_at_3

    def snapshot(self) -> Counters:
        """A copy that no longer changes."""
        return Counters(*_values(self))

    def restart(self) -> None:
        """Back to zero, but for sizes of the cache and of state."""
        for f in fields(self):
            if f.name not in _LEVELS:
                setattr(self, f.name, 0)

    def plus(self, more: Counters) -> Counters:
        """Both together; sizes of the cache and of state are this one's."""
        return Counters(
            **{
                f.name: getattr(self, f.name) + (0 if f.name in _LEVELS else getattr(more, f.name))
                for f in fields(self)
            }
        )

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`; sizes of the cache and of state stay as they are now."""
        return Counters(
            **{
                f.name: getattr(self, f.name) - (0 if f.name in _LEVELS else getattr(before, f.name))
                for f in fields(self)
            }
        )


_values = attrgetter(*Counters.__slots__)  # taken several times a token
