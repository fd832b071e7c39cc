"""A pack on disk, opened and checked: manifest, dense tensors, n-gram tables; and the digests of its bytes.

`Pack.open` reads the manifest and the header of the dense tensors and compares every section with the size of its file,
so later offsets need no more checks; only `verify` reads all bytes. Not here: experts in memory (`region`).

Invariant: every offset that an open `Pack` hands out lies inside a regular file of the pack's directory.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared_experts import limits
from shared_experts.errors import PackError
from shared_experts.manifest import (
    DENSE_FILE,
    EXPERTS_FILE,
    FILE_NAME,
    NGRAM_FILE,
    Manifest,
    NgramInfo,
    Section,
    decode,
)
from shared_experts.ngram import NgramTable
from shared_experts.qwen4_exp import TextConfig
from shared_experts.row_reader import DEFAULT_CACHE_BYTES, RowReader
from shared_experts.safetensors_reader import SafetensorsFile, TensorInfo, open_regular

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)
_DTYPE_NAMES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


class DenseReader:
    """The dense tensors by canonical name, mapped read-only; nothing is copied.

    A view keeps the map alive, so it stays valid after the pack is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with SafetensorsFile(path, _refuse_dense(path), follow=False) as file:
            self._tensors = file.tensors
            self._view = memoryview(mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Place, shape and dtype of every tensor."""
        return self._tensors

    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._tensors)

    def read(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """("bf16" or "f32", shape, its little-endian bytes, read-only); raises KeyError for an unknown name."""
        info = self._tensors[name]
        return _DTYPE_NAMES[info.dtype], info.shape, self._view[info.offset : info.offset + info.bytes]


class Pack:
    """An open pack; close it, or use it as a context."""

    def __init__(self, path: Path, manifest: Manifest, descriptors: dict[str, int]) -> None:
        self.path, self.manifest, self._descriptors = path, manifest, descriptors
        self._readers: list[RowReader] = []

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Opens a pack directory; raises PackError."""
        path = Path(path)
        manifest = decode(_read_manifest(path / FILE_NAME), path / FILE_NAME)
        pack = cls(path, manifest, {})
        try:
            pack._open_files()
            pack._check_dense()
        except BaseException:
            pack.close()
            raise
        return pack

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; twice is once."""
        while self._readers:
            self._readers.pop().close()
        descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 over the section table."""
        return self.manifest.fingerprint

    @property
    def experts_path(self) -> Path:
        """The file of expert records."""
        return self.path / EXPERTS_FILE

    def dense(self) -> DenseReader:
        """Reader of the dense tensors."""
        return DenseReader(self.path / DENSE_FILE)

    def ngram(self, layer: int) -> NgramTable:
        """The n-gram table of a 0-based decoder layer, valid while the pack is open; KeyError where there is none."""
        return NgramTable(self._descriptors[NGRAM_FILE], self._table(layer), self.path / NGRAM_FILE)

    def row_reader(self, layer: int, cache_bytes: int = DEFAULT_CACHE_BYTES) -> RowReader:
        """The same table read ahead through a cache; closed with the pack; KeyError where there is none."""
        descriptor, info = self._descriptors[NGRAM_FILE], self._table(layer)
        reader = RowReader(descriptor, info, self.path / NGRAM_FILE, cache_bytes=cache_bytes)
        self._readers.append(reader)
        return reader

    def _table(self, layer: int) -> NgramInfo:
        for info in self.manifest.ngram:
            if info.layer == layer:
                return info
        raise KeyError(layer)

    def file(self, name: str) -> bytes | None:
        """The bytes of a carried file such as `tokenizer.json`, or None; raises PackError where the digest differs."""
        section = next((s for s in self.manifest.sections if s.name == f"file.{name}"), None)
        if section is None:
            return None
        data = os.pread(self._descriptors[section.file], section.bytes, section.offset)
        if hashlib.sha256(data).digest() != section.sha256:
            raise PackError(self.path / section.file, "its bytes do not have their SHA-256", section=section.name)
        return data

    def verify(self, progress: Progress | None = None, *, threads: int | None = None) -> None:
        """Reads every section and compares its digest; raises PackError that names the first section that differs."""
        sections = self.manifest.sections
        total, done = sum(section.bytes for section in sections), 0
        with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
            results = [(section, pool.submit(self._digest, section)) for section in sections]
            try:
                for section, result in results:
                    if result.result() != section.sha256:
                        reason = "its bytes do not have their SHA-256; the file is damaged"
                        raise PackError(self.path / section.file, reason, section=section.name)
                    done += section.bytes
                    if progress is not None:
                        progress(section.name, done, total)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def prove(self, sections: Iterable[Section], check_stop: Callable[[], None]) -> None:
        """Reads them one after the other and compares their digests; raises PackError, and what `check_stop` raises,
        which is called for every block."""
        for section in sections:
            if self._digest(section, check_stop) != section.sha256:
                reason = "its bytes do not have their SHA-256; the file is damaged"
                raise PackError(self.path / section.file, reason, section=section.name)

    def _digest(self, section: Section, check_stop: Callable[[], None] = lambda: None) -> bytes:
        digest = hashlib.sha256()
        block = bytearray(min(section.bytes, limits.BLOCK_BYTES))
        done = 0
        while done < section.bytes:
            check_stop()
            view = memoryview(block)[: section.bytes - done]
            got = os.preadv(self._descriptors[section.file], [view], section.offset + done)
            if got == 0:
                raise PackError(self.path / section.file, "the file became shorter", section=section.name)
            digest.update(view[:got])
            done += got
        return digest.digest()

    def _open_files(self) -> None:
        ends: dict[str, int] = {}
        last: dict[str, Section] = {}
        for section in self.manifest.sections:
            path = self.path / section.file
            if section.file not in self._descriptors:
                descriptor, ends[section.file] = open_regular(path, functools.partial(PackError, path), follow=False)
                self._descriptors[section.file] = descriptor
            end = section.offset + section.bytes
            if end > ends[section.file]:
                reason = f"truncated: it ends at byte {end}, the file has {ends[section.file]}"
                raise PackError(path, reason, section=section.name)
            if section.name.startswith("file.") and section.bytes > limits.EXTRA_FILE_BYTES:
                raise PackError(path, f"{section.bytes} bytes are more than are read", section=section.name)
            last[section.file] = max(section, last.get(section.file, section), key=lambda each: each.offset)
        for name, section in last.items():
            if ends[name] != (wanted := section.offset + section.bytes):
                raise PackError(self.path / name, f"has {ends[name]} bytes, wanted {wanted}", section=section.name)

    def _check_dense(self) -> None:
        manifest_file, dense_file = self.path / FILE_NAME, self.path / DENSE_FILE
        experts, manifest = self.manifest.experts, self.manifest
        text = TextConfig.parse(manifest.config, lambda reason: PackError(manifest_file, f"config: {reason}"))
        said = (experts.hidden, experts.intermediate, experts.experts, experts.layers - experts.draft_layers)
        wanted = (text.hidden, text.intermediate, text.experts, len(text.layers))
        if said != wanted:
            raise PackError(manifest_file, f"experts are {said}, the config says {wanted}")
        if tuple(sorted(table.layer for table in manifest.ngram)) != text.ple_layers:
            raise PackError(manifest_file, "the n-gram tables are not those that the config names")
        for table in manifest.ngram:
            if (table.columns, len(table.head_offsets), len(table.multipliers)) != (
                text.ngram_columns, text.ngram_heads, text.ngram_size,
            ):  # fmt: skip
                raise PackError(manifest_file, "its sizes are not the config's", section=f"ngram.{table.layer}")
        found = dict(self.dense().tensors)
        for name, shape in text.dense_shapes(experts.draft_layers, head=not text.tied).items():
            info = found.pop(name, None)
            if info is None:
                raise PackError(dense_file, f"tensor {name!r} is missing", section="dense")
            if info.shape != shape:
                reason = f"tensor {name!r} has shape {list(info.shape)}, the config wants {list(shape)}"
                raise PackError(dense_file, reason, section="dense")
            dtype = dense_dtype(shape, manifest.dense_dtype)
            if _DTYPE_NAMES.get(info.dtype) != dtype:
                raise PackError(dense_file, f"tensor {name!r} has dtype {info.dtype}, wanted {dtype}", section="dense")
        for name in found:
            raise PackError(dense_file, f"tensor {name!r} is not one that the config names", section="dense")


def dense_dtype(shape: tuple[int, ...], matrices: str) -> str:
    """How a dense tensor is written: matrices as asked for, all else (norms, gates, convolutions) in f32."""
    return matrices if len(shape) == 2 else "f32"


def _read_manifest(path: Path) -> bytes:
    descriptor, size = open_regular(path, functools.partial(PackError, path), follow=False)
    with os.fdopen(descriptor, "rb") as file:
        if size > limits.MANIFEST_BYTES:
            raise PackError(path, f"has {size} bytes; at most {limits.MANIFEST_BYTES} are read")
        return file.read(size)


def _refuse_dense(path: Path) -> Callable[..., PackError]:
    def refuse(reason: str, tensor: str | None = None) -> PackError:
        return PackError(path, reason if tensor is None else f"tensor {tensor!r}: {reason}", section="dense")

    return refuse
