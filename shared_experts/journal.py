"""Which sections of an unfinished pack are whole: an append-only file that survives the death of its writer.

A line is `<first 16 hexadecimal digits of the SHA-256 of what follows> <JSON>`. The first says what the conversion is
made of; then `begin` lines, and `done` lines with place and digest, each synced before the next section begins. A torn
or spoilt line ends the journal: it and what follows do not count.

Not here: whether a section's bytes still have their digest (`pack_writer`). Invariant: a section is in `done` only if
its bytes were on disk before the line was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from shared_experts.manifest import Section

JOURNAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What decides every byte of a pack; a journal counts only for equal ones."""

    program: str
    source: str  # Checkpoint.identity
    experts: str
    dense: str

    def changes(self, before: Ingredients) -> str:
        """What is not as it was, in words; empty where nothing changed."""
        words = []
        if before.source != self.source:
            words.append("the checkpoint has changed")
        for name in ("experts", "dense", "program"):
            old, new = getattr(before, name), getattr(self, name)
            if old != new:
                words.append(f"{name} was {old}, now {new}")
        return ", ".join(words)


class Journal:
    """The journal of one conversion, open for appending; close it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.ingredients: Ingredients | None = None
        self.begun: list[str] = []
        self.done: dict[str, Section] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def start(self, ingredients: Ingredients) -> None:
        """Empties the journal and writes what the conversion is made of."""
        os.ftruncate(self._descriptor, 0)
        self.ingredients, self.begun, self.done = ingredients, [], {}
        values = {name: getattr(ingredients, name) for name in Ingredients.__slots__}
        self._append({"ingredients": values})
        os.fsync(self._descriptor)

    def begin(self, section: str) -> None:
        """Notes that a section is being written."""
        self.begun.append(section)
        self._append({"begin": section})

    def finish(self, section: Section) -> None:
        """Notes that a section is whole and on disk."""
        self.done[section.name] = section
        place = {"file": section.file, "offset": section.offset, "bytes": section.bytes}
        self._append({"done": section.name, **place, "sha256": section.sha256.hex()})
        os.fsync(self._descriptor)

    def _append(self, entry: dict[str, object]) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        line = hashlib.sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n"
        os.lseek(self._descriptor, 0, os.SEEK_END)
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _read(self) -> None:
        size = os.fstat(self._descriptor).st_size
        data = os.pread(self._descriptor, size, 0) if size <= JOURNAL_BYTES else b""
        good = 0
        for line in data.splitlines(keepends=True):
            digest, _, text = line[:-1].partition(b" ")
            if line[-1:] != b"\n" or hashlib.sha256(text).hexdigest()[:16].encode() != digest:
                break
            try:
                self._take(json.loads(text))
            except (TypeError, ValueError):  # another version's
                break
            good += len(line)
        os.ftruncate(self._descriptor, good)

    def _take(self, entry: dict[str, object]) -> None:
        """One whole line; an entry that is not known is passed over."""
        match entry:
            case {"ingredients": {**values}}:
                self.ingredients = Ingredients(**{str(name): str(value) for name, value in values.items()})
            case {"begin": str(name)}:
                self.begun.append(name)
            case {"done": str(name), "file": str(file), "offset": int(offset), "bytes": int(size), "sha256": str(hex)}:
                self.done[name] = Section(name, file, offset, size, bytes.fromhex(hex))
