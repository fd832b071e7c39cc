"""A document of the corpus and the archives it comes from: wheels and Debian packages, read without running anything.

Python files are code; documentation (reStructuredText, Markdown, HTML turned to text, a wheel's own description) is
prose. Not here: what is kept (`choose`). Invariant: one archive gives the same documents in the same order everywhere.
"""

from __future__ import annotations

import html
import io
import re
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

Kind = Literal["code", "prose", "chat"]

LARGEST_FILE_BYTES = 400_000
SPECIAL = re.compile(r"<\|[a-z_]+\|>|</?(think|tool_call|tool_response)>")  # the tokenizer would read these as tokens
CODE, PROSE = (".py",), (".rst", ".rst.txt", ".md")
SOURCES = ("/_sources/", "/rst/")  # where a documentation package keeps what its pages were made of
_SILENT = re.compile(r"(?is)<(head|script|style|nav|footer)\b.*?</\1>")
_PRE = re.compile(r"(?is)(<pre\b.*?</pre>)")
_BLOCK = re.compile(r"(?i)</?(?:p|div|br|li|tr|pre|h[1-6]|dt|dd|table|section)\b[^>]*>")
_TAG, _BLANKS = re.compile(r"<[^>]*>"), re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `source` is the package, the unit of the held-out split."""

    source: str
    path: str
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """An opened wheel's facts and files."""

    name: str
    version: str
    licence: str  # what its metadata says, joined
    documents: list[Document]


def read_wheel(path: Path) -> Wheel:
    """The documents of a wheel: its description first, then its files by name."""
    with zipfile.ZipFile(path) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.filename)
        metadata = next(i for i in infos if i.filename.endswith(".dist-info/METADATA") and i.filename.count("/") == 1)
        head, _, description = archive.read(metadata).decode(errors="replace").partition("\n\n")
        fields = [tuple(line.split(": ", 1)) for line in head.splitlines() if ": " in line and line[0] != " "]
        values: dict[str, list[str]] = {}
        for key, value in fields:
            values.setdefault(key, []).append(value)
        name = values["Name"][0].lower()
        told = [t for t in values.get("License-Expression", []) + values.get("License", [])[:1] if t.strip()]
        told += [c for c in values.get("Classifier", []) if c.startswith("License ::")]
        documents = [Document(name, "README", "prose", description)] if description.strip() else []
        for info in infos:
            if (kind := _kind(info.filename)) and info.file_size <= LARGEST_FILE_BYTES:
                documents.append(Document(name, info.filename, kind, archive.read(info).decode(errors="replace")))
    return Wheel(name, values["Version"][0], " | ".join(told)[:300], documents)


def read_debian(path: Path) -> list[Document]:
    """The documents of a Debian package: the sources of its pages where it has them, else their text; Python files."""
    name = path.name.split("_")[0]
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if member.isfile() and member.size <= LARGEST_FILE_BYTES and (file := archive.extractfile(member)):
                files[member.name] = file.read()
    from_sources = any(part in file for file in files for part in SOURCES)
    documents = []
    for at in sorted(files):
        kind, text = _kind(at), files[at].decode(errors="replace")
        if kind == "prose" or (at.endswith((".html", ".html.en")) and not from_sources):
            documents.append(Document(name, at, "prose", text if kind else text_of_html(text)))
        elif kind == "code" and "/doc/" not in at:
            documents.append(Document(name, at, "code", text))
    return documents


def _kind(name: str) -> Kind | None:
    if name.endswith(CODE):
        return "code"
    return "prose" if name.lower().endswith(PROSE) and PurePosixPath(name).parent.name != "licenses" else None


def text_of_html(page: str) -> str:
    """The readable text of a page; blocks end lines, preformatted text keeps its blanks. Fast rather than exact."""
    lines: list[str] = []
    for part in _PRE.split(_SILENT.sub("", page)):
        kept = part[:4].lower() == "<pre"
        text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", part if kept else _BLANKS.sub(" ", part))))
        lines += [line.rstrip() if kept else line.strip() for line in text.split("\n")]
    return "\n".join(line for n, line in enumerate(lines) if line or (n and lines[n - 1])).strip("\n") + "\n"
