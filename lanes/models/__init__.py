"""Models as declarations: tokens of a window in, logits out. Not here: scheduling, sampling, expert placement.

What other parts use:

    model = load_model(pack, experts, device="cpu")    an open shared_experts.pack.Pack, lanes.experts.protocol.Experts
    model.spec                                         lanes.models.qwen4_exp.spec.Spec: sizes, bounds, arithmetic
    pool = StatePool(model.state_shape, budget_bytes)  lanes.state.pool
    slot = pool.open(max_tokens)                       charges the worst case, allocates as the sequence grows
    logits = model.forward(window, pool)               fp32 [n wanted, V], in row order; any Mapping[slot, state] does
    model.hint(ids, start, end)                        those tokens come soon: what they need from disk is read ahead
    model.forget_hints()                               they will not come
    model.forward(Window.of_sequence(..., trial=True), pool)  drafts: logits as ever, but no state moves
    model.commit(pool[slot], rows)                     so many of them were right: the state moves by these
    model.guess(pool[slot], token, number)             load_model(..., drafts=True): the draft layer's logits
    pool[slot].length                                  tokens in the state: where the next window starts
    pool.reset(slot); pool.close(slot)

Invariant: `forward` either advances every sequence of the window by its rows, or raises and leaves those sequences
marked as broken (only `reset` makes such a state usable again).
"""

from __future__ import annotations

from lanes.models.load import Model, load_model

__all__ = ["Model", "load_model"]
