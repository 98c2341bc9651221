"""A small model in DeepSeek-V3.2's architecture, in torch: MLA whose indexer chooses the tokens.

Weights are named as in the checkpoints.  Exact in the precision of its weights: nothing is stored
in FP8, and the choice is that of exact scores, so it is what engines are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiles.model.config import MlaConfig
from profiles.model.model import Attend, Latents, MlaAttention, MlaModel, RmsNorm, rotate

SCORED_ROWS = 256  # query tokens whose scores are made at once
NORM_EPS = 1e-6  # of the index keys' LayerNorm, as engines have it


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MlaConfig):
    """Like ``MlaConfig``, with compressed queries and an indexer."""

    q_lora_rank: int = 256
    index_topk: int = 2048
    index_n_heads: int = 64
    index_head_dim: int = 128

    def deepseek_v3(self) -> dict[str, Any]:
        """``config.json`` of a DeepSeek-V3.2 whose layers are all dense."""
        return super().deepseek_v3() | {
            "model_type": "deepseek_v32",
            "architectures": ["DeepseekV32ForCausalLM"],
            "q_lora_rank": self.q_lora_rank,
        }


def rotate_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of pairs (j, j + d / 2), as the indexer has it; else as ``rotate``."""
    paired = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    turned = rotate(paired, positions, theta).unflatten(-1, (-1, 2))
    return torch.cat(turned.unbind(-1), -1)


class Indexer(nn.Module):
    """Tokens that each query token attends to."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.wk = nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(self, x: Tensor, compressed: Tensor, positions: Tensor) -> Tensor:
        """Bool (n, n) of one sequence: row i has the tokens that token i sees.

        Args:
            x: (n, d); compressed: (n, q_lora_rank), the layer's compressed queries.
        """
        q = self._rotated(self.wq_b(compressed).unflatten(-1, (self.config.index_n_heads, -1)),
                          positions)  # fmt: skip
        k = self._rotated(self.k_norm(self.wk(x)), positions)
        weights = self.weights_proj(x)  # the scores' scale is positive: it chooses nothing
        n = len(x)
        seen = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        topk = self.config.index_topk
        for begin in range(0, n, SCORED_ROWS):
            rows = slice(begin, min(begin + SCORED_ROWS, n))
            if rows.stop <= topk:
                continue  # they see all that is before them
            products = torch.einsum("nhd,md->nhm", q[rows], k).relu_()
            scores = torch.einsum("nhm,nh->nm", products, weights[rows]).float()
            chosen = scores.masked_fill(~seen[rows], -torch.inf).topk(topk, -1).indices
            seen[rows] &= torch.zeros_like(seen[rows]).scatter_(1, chosen, True)
        return seen

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first channels of (n, ..., 128) rotated."""
        width = self.config.qk_rope_head_dim
        turned = rotate_halves(x[None, ..., :width], positions, self.config.rope_theta)[0]
        return torch.cat((turned, x[..., width:]), -1)


class SparseAttention(MlaAttention):
    """Attention of whole sequences to what the indexer chooses."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        del self.q_proj
        rank, heads = config.q_lora_rank, config.num_attention_heads
        self.q_a_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.q_a_layernorm = RmsNorm(rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(rank, heads * config.qk_head_dim, bias=False)
        self.indexer = Indexer(config)

    def forward(
        self, x: Tensor, positions: Tensor, past: Latents | None, attend: Attend | None
    ) -> tuple[Tensor, Latents]:
        """Like ``MlaAttention.forward``, of one sequence and without tokens before it."""
        if past is not None or attend is not None or len(x) != 1:
            raise NotImplementedError("one whole sequence at a time")
        compressed = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(compressed).unflatten(-1, (self.config.num_attention_heads, -1))
        q_nope, q_rope = self.parts(q, positions)
        latents = self.latents(x, positions)
        seen = self.indexer(x[0], compressed[0], positions)
        mixed = self.expanded(q_nope, q_rope, latents, seen)
        return self.o_proj(mixed.flatten(2)), latents


class SparseModel(MlaModel):
    """The whole model."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn = SparseAttention(config)


@torch.no_grad()
def log_probabilities(model: SparseModel, prompts: list[list[int]], ids: list[list[int]]) -> Tensor:
    """(prompts, new tokens, vocabulary) fp32, of each step along the given tokens.

    Prompt and tokens go through the model at once, so prompts too attend to what is chosen.
    """
    device = next(model.parameters()).device
    rows = []
    for prompt, written in zip(prompts, ids, strict=True):
        tokens = torch.tensor([prompt + written[:-1]], device=device)
        logits, _ = model(tokens, last=len(written))
        rows.append(functional.log_softmax(logits[0].float(), -1).cpu())
    return torch.stack(rows)
