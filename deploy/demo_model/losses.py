"""What a training step minimises: next tokens, drafted tokens, balance of experts, the indexer's divergence.

Letters: B sequences, T tokens of the trunk, D draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deploy.demo_model.model.network import How, Network, Passed


@dataclass(frozen=True, slots=True)
class Shares:
    """How much each loss counts beside the main one."""

    draft: float = 0.3  # of the mean over draft steps
    balance: float = 0.002  # mild: experts may differ in use
    selection: float = 1.0  # moves the indexer alone


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean in nats over [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def losses(network: Network, tokens: torch.Tensor, how: How, draft_steps: int, chained: int) -> dict[str, torch.Tensor]:
    """Every loss of a batch: tokens int64 [B, T + 1 + D].

    The first `chained` sequences draft D steps one from another, the others one step.
    """
    length = tokens.shape[1] - 1 - draft_steps
    passed = network(tokens[:, :length], how)
    result = {"main": cross_entropy(network.logits(passed.x), tokens[:, 1 : length + 1])}
    balance, selection, drafted = [passed.balance], [passed.selection], dict[int, list[torch.Tensor]]()
    for part, steps in ((slice(0, chained), draft_steps), (slice(chained, None), min(draft_steps, 1))):
        x, ids = passed.x[part], tokens[part, : length + steps]
        if not x.shape[0] or not steps:
            continue
        passes: list[Passed] = network.draft(x, ids, steps, how)
        balance.append(passes[0].balance)
        selection.append(passes[0].selection)
        for step, one in enumerate(passes, 1):
            loss = cross_entropy(network.draft_logits(one.x), tokens[part, step + 1 : step + 1 + length])
            drafted.setdefault(step, []).append(loss * x.shape[0])
    for step, parts in drafted.items():
        count = tokens.shape[0] if step == 1 else chained
        result[f"draft{step}"] = torch.stack(parts).sum() / count
    result["balance"], result["selection"] = torch.stack(balance).mean(), torch.stack(selection).mean()
    return result


def total(parts: dict[str, torch.Tensor], shares: Shares) -> torch.Tensor:
    """The one number to go down."""
    drafts = [value for name, value in parts.items() if name.startswith("draft")]
    result = parts["main"] + shares.balance * parts["balance"] + shares.selection * parts["selection"]
    return result + shares.draft * torch.stack(drafts).mean() if drafts else result
