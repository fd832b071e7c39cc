"""The draft layer ("MTP"): one more decoder layer that guesses the token after the next.

    e    = W_e (rms(embedding of token r + 1) * w)            hidden [H]
    h_i  = W_h ((rms(x) * w)_i)                               x: token r's residual streams, normed as ONE vector of S·H
    in_i = e + h_i                                            S streams
    x'   = layer(in)                                          attention and experts, both with hyper-connections
    logits of token r + 2 = head(mixer(x'));   the next guess takes x' for x and its own token

Embedding and head are the model's. Its row r stands at position r + 1 and its index blocks count its own rows. Keys and
values depend on `in` alone, so tokens that it only has to remember cost two projections and no expert.
Not here: which guess is worth a row (`lanes.drafts`).

Invariant: keys of accepted tokens come from accepted streams only (see `DraftState`); a guess's rows lie past them.

Letters: R rows, S streams, H hidden, D vocabulary of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lanes.experts.protocol import Experts
from lanes.models.ops import product, rms
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.rows import Rotary, Rows, Run
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Connected, Mixer, whole
from lanes.models.weights import Weights
from lanes.state.sequence import DraftState, SequenceState

MOST_GUESSES = 8  # one after another; as many rows past the end are made room for


class DraftLayer:
    """The first draft layer of a checkpoint. Guesses go one sequence at a time."""

    def __init__(
        self,
        spec: Spec,
        weights: Weights,
        experts: Experts,
        embedding: torch.Tensor,
        head: torch.Tensor,
        rotary: Rotary,
    ) -> None:
        self._spec, self.embedding, self.head, self.rotary = spec, embedding, head, rotary
        wide, layer = spec.streams * spec.hidden, len(spec.layers)
        self.norm_embedding = 1.0 + weights.vector("pre_fc_norm_embedding.weight", spec.hidden)
        self.norm_streams = 1.0 + weights.vector("pre_fc_norm_hidden.weight", wide)
        self.fc_embedding = weights.matrix(("fc_embedding.weight", spec.hidden), columns=spec.hidden)
        self.fc_streams = weights.matrix(("fc_hidden.weight", spec.hidden), columns=spec.hidden)
        of = weights.under("layers.0")
        self.attention = Attention(spec, of.under("self_attn"), layer)
        self.attending = Connected(spec, of.under("attn_hyper_connection"), self.attention)
        self.thinking = Connected(spec, of.under("mlp_hyper_connection"), Moe(spec, of.under("mlp"), layer, experts))
        self.mixer = Mixer(spec, weights.under("hyper_connection_mixer"), injects=False)
        self.chained = torch.empty((0, wide))  # x' of the last guess, [1, S·H], from which the next one goes on
        self.tokens: torch.Tensor | None = None  # of the head's rows, int64 [D]; None: all, in order

    def narrow(self, token_ids: Sequence[int]) -> None:
        """From now on only these tokens are named: `guess` answers with their logits [D], in this order."""
        self.tokens = torch.tensor(token_ids, device=self.head.device)
        self.head = self.head[self.tokens]

    def erase(self) -> None:
        """Zeroes what is kept of the last guess, which nothing may go on from then."""
        self.chained.zero_()
        self.chained = self.chained[:0]

    def follow(self, state: SequenceState, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Accepted rows, streams fp32 [R, S·H], ids [R]: they wait, or are remembered. Before `state.length` moves."""
        draft = _draft(state)
        waiting, rows = draft.waiting, token_ids.shape[0]
        if waiting + rows > draft.ids.shape[0]:
            streams = torch.cat((draft.streams[:waiting], streams))
            token_ids = torch.cat((draft.ids[:waiting], token_ids))
            self._remember(state, state.length - waiting, streams[:-1], token_ids[1:])
            streams, token_ids, waiting, rows = streams[-1:], token_ids[-1:], 0, 1
        draft.streams[waiting : waiting + rows] = streams
        draft.ids[waiting : waiting + rows] = token_ids
        draft.waiting = waiting + rows

    def guess(self, state: SequenceState, token: int, number: int) -> torch.Tensor:
        """Logits fp32 [D] of what follows `token`, which follows the sequence (number 0) or the guess before it."""
        draft = _draft(state)
        chained = self.chained
        if number == 0:
            self.make_room(state)
            self.catch_up(state, 1)
            chained = draft.streams[:1]
        x, rows = self._input(state, state.length - 1 + number, chained, torch.tensor([token]))
        x = whole(self.thinking(self.attending(x, rows), rows))
        self.chained = x.flatten(1)
        u, _ = self.mixer(x)
        return product(u, self.head)[0]

    def make_room(self, state: SequenceState) -> None:
        """For all guesses at once: their rows lie past the length, and growing would lose them."""
        state.reserve(min(state.capacity_tokens, state.length + MOST_GUESSES))

    def catch_up(self, state: SequenceState, waiting: int) -> None:
        """Rows are remembered, the oldest first, until so many wait."""
        draft = _draft(state)
        done, end = draft.waiting - waiting, draft.waiting
        self._remember(state, state.length - end, draft.streams[:done], draft.ids[1 : done + 1])
        draft.streams[:waiting], draft.ids[:waiting] = draft.streams[done:end].clone(), draft.ids[done:end].clone()
        draft.waiting = waiting

    def _remember(self, state: SequenceState, start: int, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Rows from `start` on into the keys, for streams [R, S·H] and the ids [R] of the tokens after them."""
        if token_ids.shape[0]:
            x, rows = self._input(state, start, streams, token_ids)
            self.attention.remember(self.attending.mixer(x)[0], rows)

    def _input(
        self, state: SequenceState, start: int, streams: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """(in [R, S, H], rows) of the layer."""
        spec, count = self._spec, token_ids.shape[0]
        e = self.embedding[token_ids].to(streams.device).float()
        e = product(rms(e, spec.eps) * self.norm_embedding, self.fc_embedding)
        h = (rms(streams, spec.eps) * self.norm_streams).view(-1, spec.hidden)
        x = product(h, self.fc_streams).view(count, spec.streams, spec.hidden) + e[:, None]
        size, stop = spec.index_block_tokens, start + count
        blocks = self.rotary.at(torch.arange(start // size, stop // size) * size + 1)
        run = Run(state, 0, count, start, stop, blocks)
        return x, Rows(token_ids, (run,), self.rotary.at(torch.arange(start, stop) + 1))


def _draft(state: SequenceState) -> DraftState:
    assert state.draft is not None, "states of a model that drafts have a part for drafts"
    return state.draft
