from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from coordinator import limits
from coordinator.errors import BadTokenizer
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.tokenizer import Tokenizer
from tests.fakes.doors import tokenizer_dir

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(tokenizer_dir())
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def library() -> Library:
    return Library.from_file(str(tokenizer_dir() / "tokenizer.json"))


_hostile = st.lists(
    st.one_of(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|", "\n", " ", "user"]), st.text(max_size=6)),
    max_size=10,
).map("".join)


@given(text=_hostile)
def test_text_never_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    special = {tokenizer.special(name) for name in SPECIALS}
    assert None not in special
    assert not special.intersection(tokenizer.encode(text))


@given(text=_hostile)
def test_encoding_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    detokenizer = Detokenizer(tokenizer.token_bytes)
    decoded = "".join(map(detokenizer.feed, tokenizer.encode(text))) + detokenizer.flush()
    assert decoded == unicodedata.normalize("NFC", text)


@given(text=st.text(max_size=40).filter(lambda text: "<" not in text))
def test_harmless_text_is_encoded_as_the_library_does(tokenizer: Tokenizer, library: Library, text: str) -> None:
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@given(ids=st.lists(st.integers(0, 400), max_size=30))
def test_pieces_join_to_the_full_decode(tokenizer: Tokenizer, library: Library, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    for piece in pieces:
        piece.encode()  # complete characters only
    assert "".join(pieces) + detokenizer.flush() == library.decode(ids, skip_special_tokens=True)


def test_a_character_of_four_tokens_comes_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🚄")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer.token_bytes)
    assert [detokenizer.feed(token_id) for token_id in ids] == ["", "", "", "🚄"]
    assert detokenizer.flush() == ""
    detokenizer.feed(ids[0])
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text_but_a_name(tmp_path: Path) -> None:
    spec = json.loads((tokenizer_dir() / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] != "<think>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    end, think = tokenizer.special("<|im_end|>"), tokenizer.special("<think>")
    assert end is not None
    assert think is not None
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(think) == b"<think>"  # added, but not special: part of the answer
    assert tokenizer.token_bytes(1_000_000) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.special("<|nothing|>") is None


def test_no_file_is_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model": {}}',
        b'{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}',
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (tokenizer_dir() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    monkeypatch.setattr(limits, "TOKENIZER_FILE_BYTES", len(content))
    assert Tokenizer.load(tmp_path) is not None
    monkeypatch.setattr(limits, "TOKENIZER_FILE_BYTES", len(content) - 1)
    with pytest.raises(BadTokenizer):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_would_let_text_become_special_is_refused(tmp_path: Path) -> None:
    spec = json.loads((tokenizer_dir() / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["model"]["ignore_merges"] = True  # a whole word that is in the vocabulary is that token
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(BadTokenizer, match="would become a special token"):
        Tokenizer.load(tmp_path)


def test_only_byte_level_tokenizers(tmp_path: Path) -> None:
    spec = json.loads((tokenizer_dir() / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(BadTokenizer, match="byte-level"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": -1}, "is not from 0"),
        ({"id": 1 << 28}, "is not from 0"),  # 2 GiB of table
        ({"id": True}, "without content or id"),
        ({"id": "5"}, "without content or id"),
        ({"content": 5}, "without content or id"),
        ({"id": 40, "content": "<|mine|>"}, "have one id"),  # the letter that is token 40 would become special
        ({"id": 1}, "one content or one id"),
        ({"content": "<|im_end|>"}, "one content or one id"),
    ],
)
def test_added_tokens_have_content_and_id_of_their_own(tmp_path: Path, change: dict[str, object], words: str) -> None:
    spec = json.loads((tokenizer_dir() / "tokenizer.json").read_text())
    spec["added_tokens"][0] |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(BadTokenizer, match=words):
        Tokenizer.load(tmp_path)


def test_the_greatest_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (tokenizer_dir() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    monkeypatch.setattr(limits, "TOKENIZER_IDS", tokenizer.vocab_size)
    assert Tokenizer.load(tmp_path) is not None
    monkeypatch.setattr(limits, "TOKENIZER_IDS", tokenizer.vocab_size - 1)
    with pytest.raises(BadTokenizer, match="must be below"):
        Tokenizer.load(tmp_path)


def test_a_panic_of_the_library_is_an_error_as_any_other(tmp_path: Path) -> None:
    spec = json.loads((tokenizer_dir() / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 100}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(BadTokenizer, match="panicked"):
        Tokenizer.load(tmp_path)


def test_a_panic_of_the_library_is_a_bad_file(tmp_path, monkeypatch):
    class PanicException(BaseException):
        """As of a library in Rust: no Exception."""

    def panics(text):
        raise PanicException("range end index 18446744073709551615 out of range")

    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir() / "tokenizer.json").read_bytes())
    monkeypatch.setattr("coordinator.text.tokenizer.Library", type("Library", (), {"from_str": staticmethod(panics)}))
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json: range end"):
        Tokenizer.load(tmp_path)
