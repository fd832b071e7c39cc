"""A synthetic model put together: a pack directory whose experts are in memory only, and their region.

The directory is a pack's, manifest and digests included, but `experts.bin` is a hole of its size: nothing was written
there. The region is held by this process and lent over a socket as an owner lends its own; whoever attaches sees a
region of that pack. Not here: values (the other files of this package).

Invariant: one shape and seed is one fingerprint, and `lend` hands out a region that has it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.synthetic import dense, ngram, region
from bench.synthetic.noise import Noise
from bench.synthetic.routing import Routing
from bench.synthetic.shape import Shape
from bench.synthetic.walk import Walk, walk
from bench.tokenizer import write_tokenizer
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.fill import SealedRegion
from shared_experts.handoff import RegionStatus
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from shared_experts.manifest import (
    DENSE_FILE,
    EXPERTS_FILE,
    FILE_NAME,
    NGRAM_FILE,
    ExpertsInfo,
    Manifest,
    Section,
    encode,
    finished,
)
from shared_experts.qwen4_exp import ARCHITECTURE, TextConfig
from shared_experts.region import RegionShape

SEED = 1
TOKENIZER_VOCABULARY = 8192  # its training text gives no more
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Of experts and dense weights (`Synthetic.digest`) at default seed and format: committed before figures were taken.
DIGESTS = {
    "gigabyte": "78d0f8c78a78985adf230b8b80afd9d3db1d250758b2380242e5fd8ffdba84de",
    "small": "d6545662134d15b90cced04211930da02ec89ea2f86c2146d79728571117aa33",
    "true": "87a2c1bea965c6933dba2351503364a5639e4a6a1d6ad844d5027d65c0b4f99f",
}


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A finished one; `lend` as long as its region is to be had."""

    folder: Path
    shape: Shape
    walk: Walk
    manifest: Manifest
    region: SealedRegion
    seconds: dict[str, float]  # what took how long

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of the experts' layers and the dense weights."""
        total = hashlib.sha256()
        for section in self.manifest.sections:
            if section.file in (EXPERTS_FILE, DENSE_FILE):
                total.update(section.sha256)
        return total.hexdigest()

    def lend(self, socket: Path) -> DescriptorServer:
        """A server of the region's descriptor, not yet started."""
        header = self.region.header
        status = RegionStatus(
            "ready", "built", header.total_bytes, header.total_bytes, header.fingerprint, header.generation, os.getpid()
        )
        return DescriptorServer(socket, lambda: (status, self.region.fd))


@contextmanager
def made(
    folder: Path, shape: Shape, *, format: str = "q4g64", seed: int = SEED, threads: int = 1
) -> Iterator[Synthetic]:
    """Writes the pack into `folder`, which is made here, and fills the region, which goes at the end of the block."""
    folder.mkdir(parents=True)
    config, order = shape.config, walk(shape.config.vocab_size, shape.topics)
    values = config.text_config(mtp=shape.draft_layers > 0)
    text = TextConfig.parse(values, ValueError)
    layout = RecordLayout.of(EXPERT_FORMATS[format], config.hidden_size, config.moe_intermediate_size)
    layers, experts = shape.layers, config.num_experts
    noise = Noise(seed)
    seconds: dict[str, float] = {}
    with _timed(seconds, "dense"):
        dense.write(folder / DENSE_FILE, Routing(shape, order, noise), threads=threads)
        tables = ngram.write(folder / NGRAM_FILE, text, noise)
        write_tokenizer(folder, min(config.vocab_size, TOKENIZER_VOCABULARY))
    with _timed(seconds, "digests of files"):
        sections = [_whole(folder, "dense", DENSE_FILE)]
        sections += [
            _section(folder, name, NGRAM_FILE, offset, size) for table in tables for name, offset, size in table.parts()
        ]
        sections += [_whole(folder, f"file.{name}", name) for name in TOKENIZER_FILES]
    layer_bytes = experts * layout.record_bytes
    manifest: Manifest | None = None

    def shaped(digests: tuple[bytes, ...]) -> RegionShape:
        nonlocal manifest
        manifest = finished(
            Manifest(
                f"synthetic-{shape.name}", ARCHITECTURE, values,
                ExpertsInfo(
                    format, config.hidden_size, config.moe_intermediate_size, layers, shape.draft_layers, experts,
                    layout.record_bytes,
                ),
                "bf16", tables,
                (*(
                    Section(f"experts.{layer}", EXPERTS_FILE, layer * layer_bytes, layer_bytes, digest)
                    for layer, digest in enumerate(digests)
                ), *sections),
                b"", "bench.synthetic",
            )
        )  # fmt: skip
        return RegionShape.of(manifest)

    with _timed(seconds, "experts"):
        sealed = region.fill(layout, layers, experts, seed=seed, threads=threads, shaped=shaped)
    try:
        assert manifest is not None
        with (folder / EXPERTS_FILE).open("xb") as file:
            file.truncate(layers * layer_bytes)
        (folder / FILE_NAME).write_bytes(encode(manifest))
        yield Synthetic(folder, shape, order, manifest, sealed, seconds)
    finally:
        os.close(sealed.fd)


def _whole(folder: Path, name: str, file: str) -> Section:
    return _section(folder, name, file, 0, (folder / file).stat().st_size)


def _section(folder: Path, name: str, file: str, offset: int, size: int) -> Section:
    digest = hashlib.sha256()
    with (folder / file).open("rb") as source:
        source.seek(offset)
        left = size
        while left:
            block = source.read(min(left, 4 << 20))
            digest.update(block)
            left -= len(block)
    return Section(name, file, offset, size, digest.digest())


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - began_s, 2)
