"""Proof that what lanes read of a pack themselves is whole: dense weights and n-gram tables.

    before    all dense weights, and tables of at most AT_ONCE_BYTES together: before a lane gets the region
    behind    what was not proven before, while lanes run, at BEHIND_BYTES_S; what it finds is
              found before, from then on

Not here: experts (fill proves them in the region), when it happens and what follows (owner). Invariant: what this reads
is named by the manifest whose fingerprint the region has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared_experts import limits
from shared_experts.damage import DamageRecord
from shared_experts.errors import PackError
from shared_experts.manifest import DENSE_FILE, NGRAM_FILE, Section
from shared_experts.pack import Pack

AT_ONCE_BYTES = 4 << 30  # two or three seconds of one thread beside a fill
BEHIND_BYTES_S = 200e6  # lanes read rows from the same disk


@dataclass(frozen=True, slots=True)
class Proof:
    """Of one pack. Each call opens it anew: PackError where it is another one by now, or damaged."""

    pack: Path
    fingerprint: bytes
    at_once_bytes: int = AT_ONCE_BYTES
    found: DamageRecord | None = None  # of the owners before this one; None: nothing is kept

    def before(self, check_stop: Callable[[], None]) -> None:
        """As fast as one thread reads; `check_stop` is called for every block, and what it raises is raised."""
        with self._open() as pack:
            if self.found is not None:
                self.found.check()
            pack.prove(self._before(pack), check_stop)

    def behind(self, pause: Callable[[float], None]) -> None:
        """At leisure: `pause` is called for every block with the seconds it is to take; what it raises is raised."""
        with self._open() as pack:
            done = self._before(pack)
            left = [section for section in _read_by_lanes(pack) if section not in done]
            try:
                pack.prove(left, lambda: pause(limits.BLOCK_BYTES / BEHIND_BYTES_S))
            except PackError as error:
                if self.found is not None:
                    self.found.keep(error)
                raise

    def _before(self, pack: Pack) -> list[Section]:
        tables = [section for section in _read_by_lanes(pack) if section.file == NGRAM_FILE]
        small = sum(section.bytes for section in tables) <= self.at_once_bytes
        return [section for section in _read_by_lanes(pack) if small or section.file == DENSE_FILE]

    def _open(self) -> Pack:
        pack = Pack.open(self.pack)
        if pack.fingerprint != self.fingerprint:
            pack.close()
            raise PackError(self.pack, "another pack lies there than when this owner was started")
        return pack


def _read_by_lanes(pack: Pack) -> list[Section]:
    return [section for section in pack.manifest.sections if section.file in (DENSE_FILE, NGRAM_FILE)]
