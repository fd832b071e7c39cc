"""The state of one sequence: everything a model needs to go on from its last token.

Two parts, kept apart because they have different lives: rows that grow with the sequence (`AttentionState`; cutting
them is a matter of `length`) and state of fixed size that each token overwrites (`RecurrentState`, `NgramState`; going
back needs a copy). Not here: who owns a slot (`pool`), what the numbers mean (`models`).

Invariants: rows at or past `length` are never read; buffers hold at most `capacity_tokens`; a state that a forward pass
left half-advanced is `broken` until `reset`.

Letters: KV key/value heads, D head size, J index head size, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lanes.state.errors import CapacityExceeded
from lanes.state.shape import AttentionShape, DraftShape, NgramShape, RecurrentShape, StateShape
from lanes.state.trial import Trial

FIRST_ROWS = 64  # growing buffers start here, then double: each row is copied at most once more on average

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # returns memory with any contents


class AttentionState:
    """Keys, values and index keys of one attention layer."""

    __slots__ = ("_allocate", "block_keys", "keys", "raw_index_keys", "shape", "values")

    def __init__(self, shape: AttentionShape, allocate: Allocate) -> None:
        self.shape, self._allocate = shape, allocate
        self.keys = self.values = allocate((shape.kv_heads, 0, shape.head_dim), shape.dtype)  # [KV, rows, D]
        self.raw_index_keys = allocate((0, shape.index_dim), shape.dtype)  # [rows, J]
        self.block_keys = allocate((0, shape.index_dim), torch.float32)  # [rows / r, J], normed and rotated

    @property
    def rows(self) -> int:
        """Rows the buffers hold now."""
        return self.keys.shape[1]

    def grow(self, rows: int, used: int) -> None:
        """Moves the first `used` rows into buffers of `rows`."""
        shape = self.shape
        for name, full, dtype, kept in (
            ("keys", (shape.kv_heads, rows, shape.head_dim), shape.dtype, used),
            ("values", (shape.kv_heads, rows, shape.head_dim), shape.dtype, used),
            ("raw_index_keys", (rows, shape.index_dim), shape.dtype, used),
            ("block_keys", (rows // shape.block_tokens, shape.index_dim), torch.float32, used // shape.block_tokens),
        ):
            new, old = self._allocate(full, dtype), getattr(self, name)
            new[..., :kept, :] = old[..., :kept, :]
            setattr(self, name, new)
            old.zero_()  # freed memory holds nobody's state

    def of(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Views of what tokens first..end-1 have here; a block key goes with its block's last token."""
        blocks = slice(first // self.shape.block_tokens, end // self.shape.block_tokens)
        rows = slice(first, end)
        return self.keys[:, rows], self.values[:, rows], self.raw_index_keys[rows], self.block_keys[blocks]

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in self.of(0, self.rows))


class RecurrentState:
    """The matrices and convolution tail of one DeltaNet layer, fp32."""

    __slots__ = ("conv", "matrix")

    def __init__(self, shape: RecurrentShape, allocate: Allocate) -> None:
        self.matrix = allocate((shape.value_heads, shape.key_dim, shape.value_dim), torch.float32)
        self.conv = allocate((shape.conv_columns, shape.conv_channels), torch.float32)  # oldest column first

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.matrix.nbytes + self.conv.nbytes


class NgramState:
    """The convolution tail of one n-gram layer, fp32."""

    __slots__ = ("conv",)

    def __init__(self, shape: NgramShape, allocate: Allocate) -> None:
        self.conv = allocate((shape.conv_columns, shape.conv_channels), torch.float32)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.conv.nbytes


class DraftState:
    """The tokens that the draft layer has not read yet: residual streams fp32 and ids of the last `waiting` tokens.

    Invariant: the draft layer's keys hold `length - waiting` rows of the sequence; the last token always waits, because
    its row needs the id of the token after it. Chained drafts write rows past that, which are never read again.
    """

    __slots__ = ("ids", "streams", "waiting")

    def __init__(self, shape: DraftShape, allocate: Allocate) -> None:
        self.streams = allocate((shape.waiting_rows, shape.stream_columns), torch.float32)  # oldest first
        self.ids = torch.zeros(shape.waiting_rows, dtype=torch.int64)  # on the CPU
        self.waiting = 0

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.streams.nbytes + self.ids.nbytes


class SequenceState:
    """All layers' state of one sequence; `length` tokens are in it."""

    __slots__ = (
        "attention", "broken", "capacity_tokens", "context_ids", "draft", "length", "ngram", "recurrent", "shape",
        "trial",
    )  # fmt: skip

    def __init__(
        self,
        shape: StateShape,
        capacity_tokens: int,
        *,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
    ) -> None:
        if not 1 <= capacity_tokens <= shape.max_tokens:
            raise CapacityExceeded(capacity_tokens, shape.max_tokens)
        if allocate is None:

            def allocate(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.empty(size, dtype=dtype, device=device)

        self.shape, self.capacity_tokens = shape, capacity_tokens
        self.attention = {layer: AttentionState(s, allocate) for layer, s in shape.attention.items()}
        self.recurrent = {layer: RecurrentState(s, allocate) for layer, s in shape.recurrent.items()}
        self.ngram = {layer: NgramState(s, allocate) for layer, s in shape.ngram.items()}
        self.context_ids = torch.empty(shape.context_ids, dtype=torch.int64)  # on the CPU, oldest first
        self.draft = DraftState(shape.draft, allocate) if shape.draft else None
        self.reset()

    def reset(self) -> None:
        """Back to an empty sequence; grown buffers stay."""
        for recurrent in self.recurrent.values():
            recurrent.matrix.zero_()
            recurrent.conv.zero_()
        for ngram in self.ngram.values():
            ngram.conv.zero_()
        self.context_ids.fill_(self.shape.context_fill)
        if self.draft is not None:
            self.draft.waiting = 0
        self.length, self.broken = 0, False
        self.trial: Trial | None = None

    def erase(self) -> None:
        """Zeroes every buffer, so that freed memory holds nobody's state; the sequence is empty then."""
        for tensor in (*self.rows(0, self.allocated_tokens), *self.fixed()):
            tensor.zero_()
        self.reset()

    def rows(self, first: int, end: int) -> list[torch.Tensor]:
        """Views of what tokens first..end-1 have in the growing buffers, layer by layer."""
        return [view for attention in self.attention.values() for view in attention.of(first, end)]

    def fixed(self) -> list[torch.Tensor]:
        """The tensors of fixed size, which each token overwrites; a draft layer's count of waiting tokens is beside."""
        tensors = [t for recurrent in self.recurrent.values() for t in (recurrent.matrix, recurrent.conv)]
        tensors += [ngram.conv for ngram in self.ngram.values()]
        tensors.append(self.context_ids)
        return tensors + ([self.draft.streams, self.draft.ids] if self.draft else [])

    @property
    def allocated_tokens(self) -> int:
        """For how many tokens the buffers have rows now; at least 1."""
        return max((1, *(attention.rows for attention in self.attention.values())))

    @property
    def settled(self) -> int:
        """Tokens whose rows will not change: a draft layer still owes rows for those that wait."""
        return self.length - (self.draft.waiting if self.draft else 0)

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` rows in all, doubling up to the capacity."""
        if tokens > self.capacity_tokens:
            raise CapacityExceeded(tokens, self.capacity_tokens)
        for attention in self.attention.values():
            if tokens > attention.rows:
                rows = min(self.capacity_tokens, max(tokens, FIRST_ROWS, 2 * attention.rows))
                attention.grow(rows, self.length)

    def nbytes(self) -> int:
        """Bytes allocated now; never above `shape.bytes(capacity_tokens)`."""
        return (
            sum(attention.nbytes() for attention in self.attention.values())
            + sum(recurrent.nbytes() for recurrent in self.recurrent.values())
            + sum(ngram.nbytes() for ngram in self.ngram.values())
            + self.context_ids.nbytes
            + (self.draft.nbytes() if self.draft else 0)
        )
