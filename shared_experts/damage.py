"""What an owner found damaged of its pack while lanes ran, kept for its successors in the run directory.

A successor that would read everything again finds the same after minutes, in which lanes start on it; with this it
refuses at once, and no lane starts, until the file is another one: put there again, or touched. The run directory ends
with its cluster, and what is written here with it.

Not here: who finds it and when (proof). Invariant: a record that cannot be read, or is of another pack, is none.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from shared_experts import limits
from shared_experts.errors import PackError

RECORD = "damaged-pack.json"


@dataclass(frozen=True, slots=True)
class DamageRecord:
    """Of one pack, in the file `path`."""

    path: Path
    fingerprint: bytes

    def keep(self, found: PackError) -> None:
        """As good as it goes: without the record, successors read everything again."""
        record = {
            "fingerprint": self.fingerprint.hex(), "file": found.file, "section": found.section,
            "reason": found.reason, "identity": _identity(found.file),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            self.path.write_text(json.dumps(record))

    def check(self) -> None:
        """Raises the PackError that was kept, while the file is the same one; forgets it otherwise."""
        try:
            with open(self.path, "rb") as opened:
                record = json.loads(opened.read(limits.DAMAGE_RECORD_BYTES))
            file, section, reason = (str(record[name]) for name in ("file", "section", "reason"))
            same = record["fingerprint"] == self.fingerprint.hex() and record["identity"] == _identity(file)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            same = False
        if same:
            raise PackError(file, f"found while lanes ran: {reason}", section=section)
        with contextlib.suppress(OSError):
            self.path.unlink()


def _identity(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
