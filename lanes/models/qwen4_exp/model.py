"""The `qwen4_exp` text model, declared: a list of blocks over residual streams, then a mixer and a head.

Invariant: `forward` either advances every sequence of the window by its rows, or raises; after an exception that comes
once states have changed, those states are marked broken.

Letters: R rows, S streams, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lanes.experts.protocol import Experts
from lanes.models.ahead import FEW_TOKENS, Ahead, Ids
from lanes.models.delta_rule import recurrent
from lanes.models.near import Near
from lanes.models.ops import Upload, chosen_rows, product, upload
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.models.qwen4_exp.ngram import NgramLayer, NgramTable
from lanes.models.qwen4_exp.rows import Rotary, Rows, prepare
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Connected, Mixer, Streams, whole
from lanes.models.weights import Weights
from lanes.state.commit import commit, shift_ids
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from lanes.window import Meanwhile, Window, nothing

StreamBlock = Callable[[Streams, Rows], Streams]  # x [R, S, H] in, x out


class Qwen4Exp:
    """A loaded model. Windows go in one at a time; the model itself holds no sequence."""

    def __init__(
        self,
        spec: Spec,
        weights: Weights,
        experts: Experts,
        tables: Mapping[int, NgramTable],
        *,
        drafts: bool = False,
    ) -> None:
        self.spec, self.device, self.dtype = spec, weights.device, weights.dtype
        self.state_shape: StateShape = spec.state_shape(weights.dtype, drafts=drafts)
        self.rotary = Rotary(spec.rotary_dim, spec.rope_theta, weights.device)
        body = weights.under("model")
        # The embedding stays in host memory: a row of a token is nothing, the whole is a gigabyte.
        self.embedding = body.on_host().matrix(("embed_tokens.weight", spec.vocab), columns=spec.hidden)
        self._embedded = Ahead(functools.partial(_embedded, self.embedding, weights.device), "embedded-rows")
        self.blocks: list[StreamBlock] = []
        self.ngrams: list[NgramLayer] = []
        for layer, kind in enumerate(spec.layers):
            of = body.under(f"layers.{layer}")
            if layer in spec.ngram_layers:
                self.ngrams.append(NgramLayer(spec, of.under("ple"), layer, tables[layer]))
                self.blocks.append(self.ngrams[-1])
            mixing = (
                DeltaNet(spec, of.under("linear_attn"), layer)
                if kind == "deltanet"
                else Attention(spec, of.under("self_attn"), layer)
            )
            self.blocks.append(Connected(spec, of.under("attn_hyper_connection"), mixing))
            self.blocks.append(
                Connected(spec, of.under("mlp_hyper_connection"), Moe(spec, of.under("mlp"), layer, experts))
            )
        self.mixer = Mixer(spec, body.under("hyper_connection_mixer"), injects=False)
        # On a CPU a bf16 product rounds logits to 8 bits, which ties neighbours at the top: the head is fp32 there. A
        # GPU's leave it as fp32 (ops.product), and half as many bytes are read for every token.
        head = body.under("embed_tokens") if spec.tied else weights.under("lm_head")
        dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
        self.head = head.matrix(("weight", spec.vocab), columns=spec.hidden, dtype=dtype)
        self.near: Near | None = None  # for windows that may be steered
        self.upload: Upload = upload
        self.drafts: DraftLayer | None = None
        if drafts:
            self.drafts = DraftLayer(spec, weights.under("mtp"), experts, self.embedding, self.head, self.rotary)

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Tokens start..end-1 of the sequence `ids` will soon be rows: what they need from disk begins to be read."""
        if end - start > FEW_TOKENS:
            self._embedded.ahead(np.array(ids[start:end], np.int64))
        if not self.ngrams:
            return
        context = self.state_shape.context_ids
        before = [self.state_shape.context_fill] * (context - start)  # none, once the sequence is that long
        history = torch.tensor([*before, *ids[max(0, start - context) : end]], dtype=torch.int64)
        for layer in self.ngrams:
            layer.hint(history)

    def forget_hints(self) -> None:
        """Hinted tokens will not come: reads that have not begun are dropped."""
        self._embedded.forget()
        for layer in self.ngrams:
            layer.forget_hints()

    def erase(self) -> None:
        """Zeroes what is kept of the last window's rows."""
        for layer in self.ngrams:
            layer.erase()
        if self.drafts is not None:
            self.drafts.erase()

    @torch.no_grad()
    def forward(
        self, window: Window, states: Mapping[int, SequenceState], meanwhile: Meanwhile = nothing
    ) -> torch.Tensor:
        """Runs the rows and returns fp32 logits [rows that want them, V], in row order; `meanwhile` comes first."""
        rows = prepare(window, states, self.spec, self.rotary)
        if window.steered:
            rows = replace(rows, near=self.near)
        for layer in self.ngrams:
            layer.begin(rows)
        meanwhile()
        for run in rows.runs:
            run.state.broken = not window.trial  # which leaves a state as it is
        embedded = self._embedded.take(window.token_ids.numpy()) if len(window.token_ids) > FEW_TOKENS else None
        if embedded is None:
            embedded = chosen_rows(self.embedding, window.token_ids, self.device)
        x = self.upload(embedded, self.device).float()
        streams: Streams = x[:, None].repeat(1, self.spec.streams, 1)  # [R, S, H]
        for block in self.blocks:
            streams = block(streams, rows)
        x = whole(streams)
        u, _ = self.mixer(x[window.want_logits.to(self.device)])
        logits = product(u, self.head)
        for run in rows.runs:
            state, ids, its = run.state, window.token_ids[run.rows], x[run.rows].flatten(1)
            if run.trial is not None:
                run.trial.streams, state.trial = its, run.trial
                continue
            if self.drafts is not None:
                self.drafts.follow(state, its, ids)
            shift_ids(state.context_ids.numpy(), ids.numpy())
            state.length, state.broken = run.stop, False
        return logits

    def settle(self, state: SequenceState) -> None:
        """Nothing: every window leaves its states whole."""

    @torch.no_grad()
    def commit(self, state: SequenceState, rows: int) -> None:
        """The first `rows` rows of the state's trial window belong to the sequence, the others never were."""
        trial = state.trial
        if self.drafts is not None and trial is not None and trial.streams is not None:
            self.drafts.follow(state, trial.streams[:rows], trial.token_ids[:rows])
        commit(state, rows, recurrent)

    def narrow_guesses(self, token_ids: Sequence[int]) -> None:
        """From now on `guess` answers with the logits of these tokens, in this order."""
        assert self.drafts is not None, "the model was loaded with its draft layer"
        self.drafts.narrow(token_ids)

    @property
    def chains(self) -> bool:
        """One guess takes so long here that the next one is worth a thought."""
        return False

    @torch.no_grad()
    def guess(
        self, state: SequenceState, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> torch.Tensor:
        """The draft layer's logits fp32 [V] (or of a narrower choice) of what follows `token`; see `DraftLayer`."""
        assert self.drafts is not None, "the model was loaded with its draft layer"
        meanwhile()
        return self.drafts.guess(state, token, number)


def _embedded(table: torch.Tensor, device: torch.device, ids: Ids, given_up: Callable[[], bool]) -> torch.Tensor:
    return chosen_rows(table, torch.from_numpy(ids), device)
