"""The draft layer as a twin put together from transformers' own parts, which has none for this architecture.

The equations are those of lanes/models/qwen4_exp/mtp.py; the decoder layer and the mixer are transformers' modules with
the checkpoint's `mtp.*` tensors. No cache: every pass computes all rows.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextDecoderLayer, Qwen4ExpTextGatedResidual

from tests.fakes.reference_model import lowest_index_topk


class ReferenceDrafts:
    """Teacher-forced: streams of tokens 0..T-1 and the ids after them."""

    def __init__(self, reference: Qwen4ExpForCausalLM, checkpoint: Path) -> None:
        self._reference, config = reference, reference.config
        files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
        self._mtp = {
            name.removeprefix("mtp."): tensor.float()
            for tensors in files
            for name, tensor in tensors.items()
            if name.startswith("mtp.")
        }
        kinds = list(config.layer_types)
        like = max(
            i for i, kind in enumerate(kinds) if kind == "indexed_attention" and i + 1 not in config.ple_layer_ids
        )
        self._layer = Qwen4ExpTextDecoderLayer(config, like).eval()
        self._layer.load_state_dict(self._fused("layers.0.", config.num_experts))
        self._mixer = Qwen4ExpTextGatedResidual(config, use_combine=False).eval()
        self._mixer.load_state_dict(self._under("hyper_connection_mixer."))
        self._eps = config.rms_norm_eps

    @torch.no_grad()
    def streams(self, ids: list[int]) -> torch.Tensor:
        """[T, 4H] before the last mixer."""
        seen: list[torch.Tensor] = []
        hook = self._reference.model.hyper_connection_mixer.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        with lowest_index_topk():
            self._reference(torch.tensor([ids]), use_cache=False)
        hook.remove()
        return seen[0][0]

    @torch.no_grad()
    def logits(self, streams: torch.Tensor, next_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [T, V], streams [T, 4H]) of the draft layer; row r stands at position r + 1."""
        rows, count = len(next_ids), self._reference.config.hc_count
        e = self._reference.model.embed_tokens(torch.tensor(next_ids))
        e = self._rms(e, "pre_fc_norm_embedding.weight") @ self._mtp["fc_embedding.weight"].T
        h = self._rms(streams, "pre_fc_norm_hidden.weight").unflatten(1, (count, -1)) @ self._mtp["fc_hidden.weight"].T
        x = (h + e[:, None]).flatten(1)[None]
        positions = torch.arange(1, rows + 1).view(1, 1, -1).expand(3, 1, -1)
        mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]
        with lowest_index_topk():
            x = self._layer(x, self._reference.model.rotary_emb(x, positions), attention_mask=mask)
        return self._reference.lm_head(self._mixer(x))[0], x[0]

    def _rms(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * (1 + self._mtp[weight])

    def _under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): t for name, t in self._mtp.items() if name.startswith(prefix)}

    def _fused(self, prefix: str, experts: int) -> dict[str, torch.Tensor]:
        """Names as the module has them: its experts are two tensors."""
        tensors = self._under(prefix)
        parts = {
            name: torch.stack([tensors.pop(f"mlp.experts.{e}.{name}.weight") for e in range(experts)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors["mlp.experts.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors["mlp.experts.down_proj"] = parts["down_proj"]
        return tensors
