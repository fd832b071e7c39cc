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

from lanes.state import int8
from lanes.state.errors import CapacityExceeded
from lanes.state.host import HERE, PLAIN, Host
from lanes.state.pages import PagedRows, PageMemory
from lanes.state.shape import AttentionShape, DraftShape, NgramShape, RecurrentShape, StateShape
from lanes.state.trial import Trial

FIRST_ROWS = 64  # growing buffers start here, then double: each row is copied at most once more on average

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # returns memory with any contents


class AttentionState:
    """Keys, values and index keys of one attention layer: a buffer for each of `shape.growing()`, under its name."""

    __slots__ = (
        "_allocate", "_paged", "_wipe", "block_keys", "key_scales", "keys", "raw_index_keys", "shape", "value_scales",
        "values",
    )  # fmt: skip
    keys: torch.Tensor  # [KV, rows, D]
    values: torch.Tensor  # [KV, rows, D]
    key_scales: torch.Tensor  # [KV, rows, 1] where keys and values are int8
    value_scales: torch.Tensor
    raw_index_keys: torch.Tensor  # [rows, J]
    block_keys: torch.Tensor  # [rows / r, J], normed and rotated

    def __init__(
        self,
        shape: AttentionShape,
        allocate: Allocate,
        memory: PageMemory | None = None,
        most_tokens: int = 0,
        wipe: Callable[[torch.Tensor], object] = torch.Tensor.zero_,
    ) -> None:
        self.shape, self._allocate, self._wipe = shape, allocate, wipe
        self._paged: dict[str, PagedRows] = {}  # by name; empty: buffers of this sequence alone
        for each in shape.growing():
            if memory is not None:
                self._paged[each.name] = PagedRows(memory, each, most_tokens)
            setattr(self, each.name, allocate(each.size(0), each.dtype))

    @property
    def rows(self) -> int:
        """Rows the buffers hold now."""
        return self.keys.shape[1]

    def grow(self, rows: int, used: int) -> None:
        """Makes room for `rows`, of which the first `used` are kept."""
        for each in self.shape.growing():
            if buffer := self._paged.get(each.name):
                buffer.resize(each.rows(0, rows).stop)
                setattr(self, each.name, buffer.tensor)
                continue
            new, old = self._allocate(each.size(each.rows(0, rows).stop), each.dtype), getattr(self, each.name)
            kept = each.rows(0, used)
            new[..., kept, :] = old[..., kept, :]
            setattr(self, each.name, new)
            self._wipe(old)  # freed memory holds nobody's state

    def take_over(self, source: AttentionState, settled: int, tokens: int) -> None:
        """A state without rows gets another's first `tokens`: whole pages of those before `settled` are shared, where
        both have pages, everything else is copied."""
        begun = {}
        for each in self.shape.growing():
            mine, its = self._paged.get(each.name), source._paged.get(each.name)
            begun[each.name] = mine.share(its, each.rows(0, settled).stop) if mine and its else 0
        self.grow(tokens, 0)
        for each in self.shape.growing():
            rows = slice(begun[each.name], each.rows(0, tokens).stop)
            getattr(self, each.name)[..., rows, :] = getattr(source, each.name)[..., rows, :]

    def sharable_bytes(self, settled: int) -> int:
        """What `take_over` would share."""
        paged = [(self._paged.get(each.name), each.rows(0, settled).stop) for each in self.shape.growing()]
        return sum(buffer.sharable_bytes(rows) for buffer, rows in paged if buffer)

    def cut(self, settled: int) -> None:
        """Rows from `settled` on will be written anew: nobody else may have them."""
        for each in self.shape.growing():
            if buffer := self._paged.get(each.name):
                buffer.private(each.rows(0, settled).stop)
                setattr(self, each.name, buffer.tensor)

    def erase(self) -> None:
        """Lets pages go, and zeroes what is this sequence's alone."""
        for each in self.shape.growing():
            if buffer := self._paged.get(each.name):
                buffer.close()
                setattr(self, each.name, buffer.tensor)
            else:
                self._wipe(getattr(self, each.name))

    def of(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Views of what tokens first..end-1 have here; a block key goes with its block's last token."""
        return tuple(getattr(self, each.name)[..., each.rows(first, end), :] for each in self.shape.growing())

    def put(self, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes rows start..stop-1: fp32 [KV, rows, D] each."""
        for name, new in (("key", keys), ("value", values)):
            into = getattr(self, f"{name}s")[:, start:stop]
            if self.shape.int8:
                codes, scales = int8.encode(new)
                into.copy_(codes)
                getattr(self, f"{name}_scales")[:, start:stop] = scales
            else:
                into.copy_(new)

    def read(self, which: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [KV, rows, D] in the shape's dtype, of a slice of rows (views, where they are kept so) or of
        rows by number, int64 [rows]."""
        keys, values = (_rows(x, which) for x in (self.keys, self.values))
        if not self.shape.int8:
            return keys, values
        dtype = self.shape.dtype
        key_scales, value_scales = (_rows(x, which) for x in (self.key_scales, self.value_scales))
        return int8.decode(keys, key_scales, dtype), int8.decode(values, value_scales, dtype)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in self.of(0, self.rows))


def _nothing(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


def _rows(x: torch.Tensor, which: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(which, slice):
        return x[:, which]
    out = x.new_empty((x.shape[0], which.shape[0], x.shape[2]))
    for head, chosen in zip(x, out, strict=True):  # each is contiguous; all at once are not: 4 times as long
        torch.index_select(head, 0, which, out=chosen)
    return out


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
        "__weakref__", "_host", "arrival", "attention", "blank", "broken", "capacity_tokens", "context_ids", "draft",
        "home", "length", "ngram", "recurrent", "shape", "trial",
    )  # fmt: skip

    def __init__(
        self,
        shape: StateShape,
        capacity_tokens: int,
        *,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
        memory: PageMemory | None = None,
        host: Host | None = None,
    ) -> None:
        """With `memory`, rows are in pages that others may share; else in buffers of this sequence alone.

        With `host`, it has its memory from there, and tensors of fixed size only once something is in them: where a
        `Seat` is taken first, they are the seat's.
        """
        if not 1 <= capacity_tokens <= shape.max_tokens:
            raise CapacityExceeded(capacity_tokens, shape.max_tokens)
        if allocate is None:

            def allocate(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.empty(size, dtype=dtype, device=device)

        self.shape, self.capacity_tokens, self._host = shape, capacity_tokens, host or PLAIN
        self.home: Host | None = None  # its tensors are those of a `Seat` with this way to host memory
        self.arrival = HERE  # when what came out of a seat may be read on the CPU
        self.blank = host is not None  # zero, and not even there
        if host is not None:
            allocate = host.allocate
        self.attention = {
            layer: AttentionState(s, allocate, memory, shape.max_tokens, self._host.wipe)
            for layer, s in shape.attention.items()
        }
        fixed = _nothing if self.blank else allocate
        self.recurrent = {layer: RecurrentState(s, fixed) for layer, s in shape.recurrent.items()}
        self.ngram = {layer: NgramState(s, fixed) for layer, s in shape.ngram.items()}
        self.context_ids = torch.empty(shape.context_ids, dtype=torch.int64)  # on the CPU, oldest first
        self.draft = DraftState(shape.draft, fixed) if shape.draft else None
        self.reset()

    def reset(self) -> None:
        """Back to an empty sequence; grown buffers stay."""
        self.cut(0)
        if self._host is PLAIN or self.seated:
            for tensor in self._tensors():
                tensor.zero_()
        else:
            self._have(_nothing)  # a checkpoint may have what was there
        self.context_ids.fill_(self.shape.context_fill)
        if self.draft is not None:
            self.draft.waiting = 0
        self.length, self.broken = 0, False
        self.trial: Trial | None = None

    def erase(self) -> None:
        """Zeroes every buffer, so that freed memory holds nobody's state; the sequence is empty then."""
        for attention in self.attention.values():
            attention.erase()
        for tensor in self._tensors():
            self.host.wipe(tensor)
        self.reset()

    def take_over(self, source: SequenceState, settled: int, tokens: int) -> None:
        """An empty state gets another's rows of its first `tokens`, of which those from `settled` on may be written."""
        source.arrival.wait()
        for layer, attention in self.attention.items():
            attention.take_over(source.attention[layer], settled, tokens)

    def sharable_bytes(self, settled: int) -> int:
        """What a state that takes over the first `settled` tokens of this one need not take again."""
        return sum(attention.sharable_bytes(settled) for attention in self.attention.values())

    def cut(self, settled: int) -> None:
        """Going back: rows from `settled` on will be written anew, so nobody else may have them."""
        for attention in self.attention.values():
            attention.cut(settled)

    def rows(self, first: int, end: int) -> list[torch.Tensor]:
        """Views of what tokens first..end-1 have in the growing buffers, layer by layer."""
        self.arrival.wait()
        return [view for attention in self.attention.values() for view in attention.of(first, end)]

    def fixed(self) -> list[torch.Tensor]:
        """The tensors of fixed size, which each token overwrites; a draft layer's count of waiting tokens is beside."""
        self.arrival.wait()
        if self.blank:
            self.renew()
            for tensor in self._tensors():
                tensor.zero_()
            self.context_ids.fill_(self.shape.context_fill)
        return self._tensors()

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [t for recurrent in self.recurrent.values() for t in (recurrent.matrix, recurrent.conv)]
        tensors += [ngram.conv for ngram in self.ngram.values()]
        tensors.append(self.context_ids)
        return tensors + ([self.draft.streams, self.draft.ids] if self.draft else [])

    def renew(self) -> None:
        """All tensors of fixed size will be written: outside a seat into memory that no checkpoint has."""
        if not (self._host is PLAIN or self.seated):
            self._have(self._host.allocate)
            self.blank = False

    def _have(self, allocate: Allocate) -> None:
        """Other tensors of fixed size."""
        self.blank = True
        for layer, recurrent in self.shape.recurrent.items():
            self.recurrent[layer] = RecurrentState(recurrent, allocate)
        for layer, ngram in self.shape.ngram.items():
            self.ngram[layer] = NgramState(ngram, allocate)
        if self.draft is not None and self.shape.draft is not None:
            waiting, self.draft = self.draft.waiting, DraftState(self.shape.draft, allocate)
            self.draft.waiting = waiting

    @property
    def host(self) -> Host:
        """Where it is kept while it waits."""
        return self.home or self._host

    @property
    def seated(self) -> bool:
        """Whether its tensors are those of a `Seat`."""
        return self.home is not None

    @property
    def allocated_tokens(self) -> int:
        """For how many tokens the buffers have rows now, or need them once it has left its seat; at least 1."""
        return max(1, self.length) if self.seated else self._buffer_rows

    @property
    def _buffer_rows(self) -> int:
        return max((1, *(attention.rows for attention in self.attention.values())))

    @property
    def settled(self) -> int:
        """Tokens whose rows will not change: a draft layer still owes rows for those that wait."""
        return self.length - (self.draft.waiting if self.draft else 0)

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` rows in all, doubling up to the capacity."""
        if tokens > self.capacity_tokens:
            raise CapacityExceeded(tokens, self.capacity_tokens)
        if self.seated:  # which has room for the longest
            return
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
