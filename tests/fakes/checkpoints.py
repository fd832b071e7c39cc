"""Small checkpoints and packs for tests, and the surgery that spoils them."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from bench.checkpoint import TinyConfig, write_checkpoint
from shared_experts import manifest as manifests

SMALL = TinyConfig(
    vocab_size=300, hidden_size=64, num_hidden_layers=4, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    ngram_vocab_size_base=50, heads_per_ngram=2, make_ngram_vocab_size_divisible_by=16,
)  # fmt: skip


def small_checkpoint(path: Path, config: TinyConfig = SMALL, seed: int = 0, **options) -> Path:
    """A checkpoint of about 1 MB; without a tokenizer unless asked for."""
    return write_checkpoint(path, config, seed, **{"tokenizer": False, **options})


def read_header(path: Path) -> tuple[dict, bytes]:
    """(header, data) of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: dict | bytes, data: bytes) -> None:
    """The inverse of `read_header`; bytes are written as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the header of a safetensors file in place."""
    header, data = read_header(path)
    change(header)
    write_header(path, header, data)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Changes a JSON file in place."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_manifest(path: Path, change: Callable[[dict], object], *, sign: bool = True) -> None:
    """Changes the body of a pack's manifest; signed again, with a fresh fingerprint where that can be computed."""
    import hashlib

    import msgpack

    file = path / "manifest.msgpack"
    whole = msgpack.unpackb(file.read_bytes())
    body = msgpack.unpackb(whole["body"])
    change(body)
    if sign:
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            body["fingerprint"] = manifests.fingerprint_of(_loose(body))
    packed = msgpack.packb(body)
    whole |= {"body": packed, "sha256": hashlib.sha256(packed).digest()}
    file.write_bytes(msgpack.packb(whole))


def _loose(body: dict) -> manifests.Manifest:
    """The body as a Manifest, unchecked."""
    values = dict(body)
    values["experts"] = manifests.ExpertsInfo(**body["experts"])
    values["sections"] = tuple(manifests.Section(**s) for s in body["sections"])
    values["ngram"] = tuple(
        manifests.NgramInfo(**{name: tuple(v) if isinstance(v, list) else v for name, v in table.items()})
        for table in body["ngram"]
    )
    return manifests.Manifest(**values)
