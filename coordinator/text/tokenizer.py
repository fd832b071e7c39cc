"""The pack's tokenizer: text to ids, ids to bytes. Text never becomes a special token.

The `tokenizers` library would see added tokens ("<|im_end|>", "<think>") inside a user's text, so the instance that
encodes is built without them; their ids come from `special` alone. Byte-level tokenizers only: each ordinary token is a
fixed run of bytes.

Not here: chat formats (renderer), streams (detokenizer). Invariant: no id that `encode` returns belongs to an added
token that is more than white space; checked for every such token when the tokenizer is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from coordinator import limits
from coordinator.errors import BadPack, BadTokenizer
from coordinator.pack_file import Digests, read_pack_file

FILE_NAME = "tokenizer.json"


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the other 68 for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _panicked(error: BaseException) -> bool:
    """Whether the library did, which is written in Rust: a panic is no Exception, and nobody above would expect it."""
    return type(error).__name__ == "PanicException"


class TooManyTokens(Exception):
    """A text has more tokens than the caller has room for."""


class Tokenizer:
    """One pack's tokenizer. Thread-safe: immutable once loaded. Use `load`."""

    def __init__(self, spec: dict[str, Any], where: str) -> None:
        added = _added_tokens(spec, where)
        plain = dict(spec)
        plain["added_tokens"] = [token for token in added if not token["content"].strip()]
        plain["post_processor"] = plain["truncation"] = plain["padding"] = None
        self._library = Library.from_str(json.dumps(plain))
        self._special_ids: dict[str, int] = {
            token["content"]: token["id"] for token in added if token["content"].strip()
        }
        self._added_text: dict[int, str] = {token["id"]: token["content"] for token in added}
        silent = {token["id"] for token in added if token["special"]}
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max([*vocabulary.values(), *self._added_text], default=-1) + 1
        if self.vocab_size > limits.TOKENIZER_IDS:
            raise BadTokenizer(f"{where}: an id of {self.vocab_size - 1}; all must be below {limits.TOKENIZER_IDS}")
        self._bytes = [b""] * self.vocab_size
        for content, token_id in [*vocabulary.items(), *self._special_ids.items()]:
            self._bytes[token_id] = b"" if token_id in silent else _bytes_of(content)
        self.longest_token_bytes = max(map(len, self._bytes), default=1)
        ordinary = {token_id: content for content, token_id in vocabulary.items()}
        for content, token_id in self._special_ids.items():
            if ordinary.get(token_id, content) != content:
                raise BadTokenizer(f"{where}: {content!r} and {ordinary[token_id]!r} have one id")
        guarded = set(self._special_ids.values())
        for content in self._special_ids:
            texts = (content, f"a{content}b", f" {content}\n")
            if any(guarded.intersection(self.encode(text)) for text in texts):
                raise BadTokenizer(f"{where}: plain text {content!r} would become a special token")

    @classmethod
    def load(cls, directory: Path, digests: Digests | None = None) -> Tokenizer | None:
        """The tokenizer of a pack; None when the pack has none. `BadTokenizer` names the file and the reason."""
        path = directory / FILE_NAME
        try:
            spec = json.loads(read_pack_file(path, limits.TOKENIZER_FILE_BYTES, digests))
            _check(spec, str(path))
            return cls(spec, str(path))
        except FileNotFoundError:
            return None
        except (BadTokenizer, BadPack):
            raise
        except Exception as error:  # the library raises bare Exception
            raise BadTokenizer(f"{path}: {error}") from error
        except BaseException as error:  # and its panics are none
            if not _panicked(error):
                raise
            raise BadTokenizer(f"{path}: {error}") from error

    def encode(self, text: str, *, at_most: int | None = None) -> list[int]:
        """The ids of plain text; nothing is added and nothing in it is special. `TooManyTokens` when over `at_most`."""
        # the batch call releases the interpreter while it works (`encode` held it for seconds on a text of megabytes)
        # and skips offsets, which halves its time
        try:
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        except Exception:
            raise
        except BaseException as error:  # a panic of the library is no Exception: nobody above would answer the client
            if not _panicked(error):
                raise
            raise RuntimeError("the tokenizer library panicked") from None
        if at_most is not None and len(encoding) > at_most:
            raise TooManyTokens(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def special(self, content: str) -> int | None:
        """The id of an added token; None when this tokenizer has no such token."""
        return self._special_ids.get(content)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to an answer: nothing for special tokens and ids without a token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token for people, specials by name. Parts of a character show as U+FFFD."""
        return self._added_text.get(token_id) or self.token_bytes(token_id).decode(errors="replace")


def _check(spec: object, where: str) -> None:
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise BadTokenizer(f"{where}: not a tokenizer")
    decoder = spec.get("decoder") or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    if "ByteLevel" not in kinds:
        raise BadTokenizer(f"{where}: only byte-level tokenizers are supported, this one decodes by {kinds[0]}")


def _added_tokens(spec: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The added tokens, each with a content and an id of its own."""
    added = spec.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise BadTokenizer(f"{where}: added_tokens is not a list of tokens")
    for token in added:
        if not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
            raise BadTokenizer(f"{where}: an added token without content or id")
        if not 0 <= token["id"] < limits.TOKENIZER_IDS:
            raise BadTokenizer(f"{where}: the id {token['id']} is not from 0 to {limits.TOKENIZER_IDS - 1}")
    if any(len({token[name] for token in added}) != len(added) for name in ("content", "id")):
        raise BadTokenizer(f"{where}: two added tokens have one content or one id")
    return added


def _bytes_of(content: str) -> bytes:
    """As the library decodes: a token with a character outside the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in content)
    except KeyError:
        return content.encode()
