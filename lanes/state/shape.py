"""How much a sequence remembers: the shape of a model's state, and its bytes.

A model declares its `StateShape`; state code never looks at a model. Sizes here are exact: they equal the bytes of the
tensors that `SequenceState` allocates, so a budget that admits a sequence can hold it.

Letters: KV key/value heads, D head size, J index head size, r tokens per index block, C channels.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, replace

import torch


def dtype_bytes(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


@dataclass(frozen=True, slots=True)
class Growing:
    """One buffer of an attention layer: a row for every `tokens` tokens, in each of `heads` columns of rows."""

    name: str  # the attribute of `AttentionState`
    heads: int  # 0: rows without a dimension of heads
    width: int
    dtype: torch.dtype
    tokens: int = 1

    def size(self, rows: int) -> tuple[int, ...]:
        """The shape of that many rows: [heads, rows, width], or [rows, width]."""
        return (self.heads, rows, self.width) if self.heads else (rows, self.width)

    def row_bytes(self) -> int:
        """Bytes of one row of all heads."""
        return max(1, self.heads) * self.width * dtype_bytes(self.dtype)

    def rows(self, first: int, end: int) -> slice:
        """The rows of tokens first..end-1; a row of several tokens goes with the last of them."""
        return slice(first // self.tokens, end // self.tokens)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Rows that grow with the sequence: keys and values, raw index keys in `dtype`, block keys in fp32.

    Keys and values are in `dtype`, or with `int8` as codes and an fp32 scale for each row of a head. Block keys stay
    fp32: their scores decide which blocks are read, and a rounded score invents ties.
    """

    kv_heads: int  # KV
    head_dim: int  # D
    index_dim: int  # J
    block_tokens: int  # r
    dtype: torch.dtype  # that attention computes in
    int8: bool = False

    def growing(self) -> tuple[Growing, ...]:
        """The buffers, in the order in which a sequence names and a snapshot writes them."""
        return _growing(self)

    def token_bytes(self) -> int:
        """Bytes per token, without block keys: 2·KV·D values (int8: bytes, and 2·KV scales) and J raw index values."""
        return sum(each.row_bytes() for each in self.growing() if each.tokens == 1)

    def row_shapes(self, first: int, end: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what tokens first..end-1 have, and of the keys of blocks they end."""
        rows = [(each, each.rows(first, end)) for each in self.growing()]
        return [(each.size(of.stop - of.start), each.dtype) for each, of in rows]

    def block_bytes(self) -> int:
        """Bytes per complete block of r tokens: one fp32 key of J."""
        return 4 * self.index_dim


@functools.cache  # asked for every buffer that moves
def _growing(shape: AttentionShape) -> tuple[Growing, ...]:
    kept = torch.int8 if shape.int8 else shape.dtype
    scales = [Growing(f"{name}_scales", shape.kv_heads, 1, torch.float32) for name in ("key", "value")]
    return (
        Growing("keys", shape.kv_heads, shape.head_dim, kept),
        Growing("values", shape.kv_heads, shape.head_dim, kept),
        *(scales if shape.int8 else ()),
        Growing("raw_index_keys", 0, shape.index_dim, shape.dtype),
        Growing("block_keys", 0, shape.index_dim, torch.float32, shape.block_tokens),
    )


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """State of fixed size, all fp32: a matrix per value head and the last pre-convolution columns."""

    value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_columns: int

    def bytes(self) -> int:
        """4 bytes for each element of S [heads, key_dim, value_dim] and of the tail [columns, channels]."""
        return 4 * (self.value_heads * self.key_dim * self.value_dim + self.conv_columns * self.conv_channels)


@dataclass(frozen=True, slots=True)
class NgramShape:
    """The fp32 convolution columns of one n-gram layer."""

    conv_channels: int
    conv_columns: int

    def bytes(self) -> int:
        """4 bytes for each element of the tail."""
        return 4 * self.conv_columns * self.conv_channels


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft layer needs beside its rows in `StateShape.attention`: the last tokens' residual streams, fp32.

    Row r of its keys belongs to token r + 1 and needs the stream of token r: the last tokens of a sequence wait here.
    """

    layer: int  # its key in `StateShape.attention`: the number after the decoder's last
    stream_columns: int  # all streams of a token, end to end
    waiting_rows: int  # tokens that may wait

    def bytes(self) -> int:
        """4 bytes for each element of the streams [rows, columns], 8 for each token id."""
        return self.waiting_rows * (4 * self.stream_columns + 8)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Everything one sequence holds, by 0-based decoder layer."""

    attention: dict[int, AttentionShape]
    recurrent: dict[int, RecurrentShape]
    ngram: dict[int, NgramShape]
    context_ids: int  # last token ids kept for n-grams
    context_fill: int  # the id that stands before the first token
    max_tokens: int
    draft: DraftShape | None = None  # None: no draft layer is used

    def with_int8(self) -> StateShape:
        """The same with keys and values as int8."""
        return replace(self, attention={layer: replace(s, int8=True) for layer, s in self.attention.items()})

    def fixed_bytes(self) -> int:
        """Bytes whatever the length: recurrent state, convolution tails, 8 per context id, what waits for drafts."""
        return (
            sum(s.bytes() for s in self.recurrent.values())
            + sum(s.bytes() for s in self.ngram.values())
            + 8 * self.context_ids
            + (self.draft.bytes() if self.draft else 0)
        )

    def growing_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` rows in every attention layer, with the block keys they complete."""
        return sum(
            tokens * s.token_bytes() + tokens // s.block_tokens * s.block_bytes() for s in self.attention.values()
        )

    def row_shapes(self, first: int, end: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what tokens first..end-1 have, in the order of `SequenceState.rows`."""
        return [each for shape in self.attention.values() for each in shape.row_shapes(first, end)]

    def bytes(self, tokens: int) -> int:
        """Bytes of a sequence with room for `tokens`."""
        return self.fixed_bytes() + self.growing_bytes(tokens)

    def tokens_in(self, size_bytes: int) -> int:
        """The most tokens, up to `max_tokens`, that a sequence of at most that many bytes has room for; 0: none."""
        return bisect.bisect_right(range(1, self.max_tokens + 1), size_bytes, key=self.bytes)
