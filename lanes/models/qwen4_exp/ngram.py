"""N-gram embeddings: a hash of the last tokens picks rows of a table; gated by the streams, they add local memory.

Rows depend on token ids alone (`row_ids`), so they are asked for before anything is computed (`begin`) and collected
when the layer runs; ids of a later window can be hinted.

    m_n(t) = xor over i < n of id(t - i) * M_i              for orders n = 2..ngram_order
    row    = m_n mod p_head + offset_head
    e      = the rows of all heads, end to end
    gate_i = (norm_key(W_k e)_i . norm_query(x)_i) / sqrt(H);   gate_i = sign * sqrt(max(|gate_i|, 1e-6))
    gv_i   = sigmoid(gate_i) * W_v e
    x     += gv + silu(conv(norm_conv(gv)))                 taps ngram_order apart

An end-of-sequence token hides itself and everything before it from the tokens that follow. Not here: the table.

Letters: R rows, S streams, H hidden, N heads, D row columns, T taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lanes.models.ops import Upload, alike, causal_conv, product, rms, upload
from lanes.models.qwen4_exp.row_ids import Hash, Ids, bound, row_id_array
from lanes.models.qwen4_exp.rows import Rows, Run
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Streams, whole
from lanes.models.weights import Weights

LEAST_GATE = 1e-6
SLICE_ROWS = 1024  # eight tensors as large as the streams live at once: of so many rows


class NgramTable(Protocol):
    """One layer's table and the constants of its hash, all int64 on the CPU."""

    multipliers: torch.Tensor  # [ngram_order]
    offsets: torch.Tensor  # [N]
    sizes: torch.Tensor  # [N]

    def prefetch(self, ids: torch.Tensor) -> None:
        """Row ids int64 [R, N] that will be asked for; never waits."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[R, N * D] of any float type for row ids int64 [R, N]; fp32 of a decode window's."""
        ...

    def taker(self, ids: Ids, out: npt.NDArray[np.float32]) -> Callable[[int], bool]:
        """`take(r)`: `rows` of the first r of `ids` [R, N] into `out` [R, N * D], or False and `rows` says why not;
        counted when `count` is called."""
        ...

    def count(self) -> None:
        """What was taken is counted."""
        ...

    def forget(self) -> None:
        """What was prefetched will not be asked for."""
        ...


def row_ids(history: torch.Tensor, eos: int, table: NgramTable, heads_per_order: int) -> torch.Tensor:
    """Row ids int64 [R, N] for the last R tokens of `history` [ngram_order - 1 + R]."""
    return torch.from_numpy(row_id_array(history.numpy(), eos, Hash.of(table), heads_per_order))


class NgramLayer:
    """One layer's n-gram embedding, added to all streams."""

    def __init__(self, spec: Spec, weights: Weights, layer: int, table: NgramTable) -> None:
        self._spec, self.layer, self.table = spec, layer, table
        self._hash: Hash | None = None  # once it is asked for
        self.upload: Upload = upload
        self._asked = torch.empty(0, dtype=torch.int64)  # row ids of the window that runs, [R, N]
        self._named = np.empty((0, spec.ngram_heads), np.int64)  # the same of `bound`
        wide = spec.streams * spec.hidden
        self.key_value = weights.matrix(
            ("key_proj.weight", wide), ("value_proj.weight", spec.hidden), columns=spec.ngram_dim
        )
        self.norm_key, self.norm_query, self.norm_conv = (
            1.0 + weights.vector(f"norm_{name}.weight", wide).view(spec.streams, spec.hidden)
            for name in ("key", "query", "conv")
        )
        taps = weights.vector("conv1d.weight", wide, 1, spec.ngram_conv_taps)
        self.taps = taps.squeeze(1).t().contiguous().unbind()  # of [S * H] each

    def begin(self, rows: Rows) -> None:
        """First thing of a window: the reads of its rows begin."""
        histories = [torch.cat((run.state.context_ids, rows.token_ids[run.rows])) for run in rows.runs]
        self._asked = torch.cat([self._row_ids(history) for history in histories])
        self.table.prefetch(self._asked)

    def rows_of(self, history: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """fp32 [R, D] of the last R tokens of `history`: what the layer reads after `begin`, at once."""
        spec, self._hash = self._spec, self._hash or Hash.of(self.table)
        ids = row_id_array(history, spec.ngram_reset, self._hash, spec.ngram_heads_per_order)
        return self.table.rows(torch.from_numpy(ids)).numpy()

    def bound(self, history: Ids, said: npt.NDArray[np.float32]) -> Callable[[int], bool]:
        """`rows_of` with arguments made once: a call with r has the rows of the first ngram_order - 1 + r of `history`,
        as they are then, in said[:r] of fp32 [R, D]; False where `rows_of` is to say why not. `table.count` counts.

        Raises NativeKernelUnavailable.
        """
        spec = self._spec
        self._named = ids = np.zeros((len(said), spec.ngram_heads), np.int64)
        name = bound(history, spec.ngram_reset, Hash.of(self.table), spec.ngram_heads_per_order, ids)
        take = self.table.taker(ids, said)

        def say(rows: int) -> bool:
            name(rows)
            return take(rows)

        return say

    def hint(self, history: torch.Tensor) -> None:
        """A later window will have these ids, all but the first ngram_order - 1 of which are its rows."""
        self.table.prefetch(self._row_ids(history))

    def forget_hints(self) -> None:
        """Hinted windows will not come."""
        self.table.forget()

    def erase(self) -> None:
        """Zeroes what is kept of the last window."""
        self._asked.zero_()
        self._named.fill(0)

    def __call__(self, x: Streams, rows: Rows) -> torch.Tensor:
        """x [R, S, H], changed in place and returned; `begin` has seen the same rows."""
        x = whole(x)
        embedded = self.upload(self.table.rows(self._asked), x.device)  # [R, N * D]
        run = rows.runs[0]
        if len(x) <= SLICE_ROWS or len(rows.runs) > 1 or run.trial is not None:
            self._add(x, embedded, rows.runs)
            return x
        for part in (slice(first, first + SLICE_ROWS) for first in range(0, len(x), SLICE_ROWS)):
            self._add(x[part], embedded[part], (replace(run, first=0, end=len(x[part])),))
        return x

    def _add(self, x: torch.Tensor, embedded: torch.Tensor, runs: Sequence[Run]) -> None:
        """To x [R, S, H]; moves the states' tails on."""
        spec = self._spec
        key, value = product(embedded, self.key_value).split((spec.streams * spec.hidden, spec.hidden), dim=1)
        key = rms(key.view_as(x), spec.eps) * self.norm_key
        gate = (key * (rms(x, spec.eps) * self.norm_query)).sum(-1, keepdim=True) / math.sqrt(spec.hidden)
        gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()  # [R, S, 1]
        gated = alike(torch.sigmoid, gate.flatten(1))[..., None] * value[:, None, :]
        normed = (rms(gated, spec.eps) * self.norm_conv).flatten(1)
        x += gated
        for run in runs:
            tail = run.state.ngram[self.layer].conv
            columns = torch.cat((tail, normed[run.rows]))
            x[run.rows] += F.silu(causal_conv(columns, self.taps, spec.ngram_order)).view(-1, *x.shape[1:])
            if run.trial is None:
                tail.copy_(columns[-tail.shape[0] :])
            else:
                run.trial.ngram[self.layer] = normed[run.rows]

    def _row_ids(self, history: torch.Tensor) -> torch.Tensor:
        return row_ids(history, self._spec.ngram_reset, self.table, self._spec.ngram_heads_per_order)
