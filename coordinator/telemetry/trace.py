"""One request as one line of JSON: what `serve --trace-requests` writes and bench reads. Pure.

Not here: files (trace_writer), reading (bench.request_trace). Invariants: no text, no token ids, no name that a client
chose: of a session there is a digest, by which lines of one session are found again and which says nothing else.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from coordinator.telemetry.request_record import RequestRecord

VERSION: Final = 1
_DIGITS: Final = 6  # microseconds


def line(record: RequestRecord) -> str:
    """A record that has ended, without a line break. Times are seconds of the host's monotonic clock."""
    stamps = record.stamps_ns or ()
    return json.dumps(
        {
            "v": VERSION,
            "id": record.id,
            "door": record.door,
            "tenant": record.tenant,
            "session": hashlib.sha256(record.session.encode()).hexdigest()[:16] if record.session else None,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "replaced_choices": record.replaced_choices,  # null: the prompt was read exactly
            "max_tokens": record.max_tokens,
            "tokens": record.tokens,
            "queued_s": _seconds(record.queued_s),
            "begun_s": _seconds(record.begun_s),
            "first_token_s": _seconds(record.first_token_s),
            "ended_s": _seconds(record.ended_s),
            "outcome": record.outcome,
            "lanes": record.lanes,  # [name, tokens that there were when it began]
            "stamps_s": [round(stamp / 1e9, _DIGITS) for stamp in stamps],  # fewer than tokens: over the limit
        },
        separators=(",", ":"),
        allow_nan=False,
    )


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
