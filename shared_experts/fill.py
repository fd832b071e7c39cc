"""Fills a region from `experts.bin`, or proves that one is right: many threads, one SHA-256 per layer.

Not here: who may have the result (handoff.py, owner.py).
Invariant: `build` returns a descriptor only of a region whose every layer, as it lies in the region, has the manifest's
digest; whatever fails on the way gives the memory back.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from shared_experts import memfd
from shared_experts.errors import PackError, RegionError, RegionMismatch
from shared_experts.layout import REGION_HEADER_BYTES, REGION_STATE_OFFSET
from shared_experts.region import GENERATION_BYTES, READY_WORD, RegionHeader, RegionShape

CHUNK_BYTES = 4 << 20  # one read and one hash update: long enough to run outside the interpreter lock, fits the L2/L3

# Called with (step, bytes done so far); steps in order: "filling" (many times), "data", "header", "ready", "sealed".
# May raise to stop.
OnStep = Callable[[str, int], None]


class Stopped(Exception):
    """The owner was asked to stop; raised by an `OnStep` callback, passed through unchanged."""


@dataclass(frozen=True, slots=True)
class SealedRegion:
    """A finished region: its O_RDONLY descriptor (owned by whoever holds this) and its header."""

    fd: int
    header: RegionHeader
    page_bytes: int


def build(
    experts_path: str | os.PathLike[str], shape: RegionShape, *, threads: int, on_step: OnStep, huge_pages: bool = True
) -> SealedRegion:
    """A new region from the file, with a new generation. Raises PackError (bytes) or RegionError (memory)."""
    memory = memfd.create(shape.total_bytes, huge_pages=huge_pages)
    try:
        # The header's page exists from here on, so that no plain store below can fault for want of memory.
        os.posix_fallocate(memory.fd, 0, REGION_HEADER_BYTES)
        with memoryview(memory.map) as view:
            _fill(view, experts_path, shape, threads, on_step)
            on_step("data", shape.total_bytes)
            header = RegionHeader.of(shape, os.urandom(GENERATION_BYTES), os.getpid())
            encoded = header.encode()
            view[: len(encoded)] = encoded
            on_step("header", shape.total_bytes)
            view[REGION_STATE_OFFSET : REGION_STATE_OFFSET + 8] = READY_WORD
        on_step("ready", shape.total_bytes)
    except OSError as error:
        memory.discard()
        raise RegionError(f"cannot fill the region: {error.strerror}") from error
    except BaseException:
        memory.discard()
        raise
    fd = memfd.seal(memory)
    try:
        on_step("sealed", shape.total_bytes)
    except BaseException:
        os.close(fd)
        raise
    return SealedRegion(fd, header, memory.page_bytes)


def _fill(view: memoryview, path: str | os.PathLike[str], shape: RegionShape, threads: int, on_step: OnStep) -> None:
    """Reads each layer into its place and hashes the bytes where they lie, chunk by chunk while they are warm."""
    size = shape.layers * shape.layer_bytes
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PackError(path, f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(source).st_size
        if found < size:
            raise PackError(path, f"{found} bytes, the manifest says {size}")

        def chunk(offset: int, length: int) -> memoryview:
            # Views are released by name: the map cannot be closed while one lives on, in a traceback for example.
            target = view[REGION_HEADER_BYTES + offset : REGION_HEADER_BYTES + offset + length]
            try:
                _read_whole(source, target, offset)
            except BaseException as error:
                target.release()
                if isinstance(error, EOFError):
                    raise PackError(path, f"ends early: {error}, the manifest says {size} bytes") from None
                raise
            return target

        _hash_layers(chunk, shape, threads, on_step, lambda layer: PackError(
            path, "its bytes do not have the manifest's SHA-256", section=f"experts.{layer}"
        ))  # fmt: skip
    finally:
        os.close(source)


def verify(fd: int, shape: RegionShape, *, threads: int, on_step: OnStep) -> None:
    """Raises RegionMismatch unless every layer behind the sealed `fd` has the manifest's digest.

    Reads with pread, never through a map: a foreign region with holes cannot make this process fault.
    """
    local = threading.local()

    def chunk(offset: int, length: int) -> memoryview:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(CHUNK_BYTES)
        target = memoryview(local.buffer)[:length]
        try:
            _read_whole(fd, target, REGION_HEADER_BYTES + offset)
        except EOFError as error:
            raise RegionMismatch(f"the region ends early: {error}", check="size") from None
        return target

    _hash_layers(chunk, shape, threads, on_step, lambda layer: RegionMismatch(
        f"layer {layer}'s bytes do not have the manifest's SHA-256", check="digest"
    ))  # fmt: skip


def _read_whole(fd: int, target: memoryview, offset: int) -> None:
    """Fills `target` from the file; a page of it that cannot be had is EFAULT here, where a store would be SIGBUS."""
    done = 0
    while done < len(target):
        with target[done:] as rest:
            count = os.preadv(fd, [rest], offset + done)
        if count == 0:
            raise EOFError(f"no byte at {offset + done}")
        done += count


def _hash_layers(
    chunk: Callable[[int, int], memoryview],
    shape: RegionShape,
    threads: int,
    on_step: OnStep,
    wrong: Callable[[int], Exception],
) -> None:
    """Runs `chunk` over every layer in ascending offsets, one layer per thread at a time, and compares the digests."""
    lock = threading.Lock()
    stop = threading.Event()
    done_bytes = 0

    def layer_task(layer: int) -> None:
        nonlocal done_bytes
        digest = hashlib.sha256()
        start = layer * shape.layer_bytes
        for offset in range(start, start + shape.layer_bytes, CHUNK_BYTES):
            if stop.is_set():
                return
            length = min(CHUNK_BYTES, start + shape.layer_bytes - offset)
            with chunk(offset, length) as data:
                digest.update(data)
            with lock:
                done_bytes += length
                on_step("filling", done_bytes)
        if digest.digest() != shape.layer_sha256[layer]:
            raise wrong(layer)

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="region-fill") as pool:
        futures = [pool.submit(layer_task, layer) for layer in range(shape.layers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # whoever waits on: no thread reads on after a failure
    for future in futures:
        future.result()
