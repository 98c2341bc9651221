"""An MLA transformer in DeepSeek's architecture, whose attention can be exchanged.

Weights are named as in transformers' ``DeepseekV3ForCausalLM``.  Training and prefill expand the
latent to keys and values of each head; ``attend`` given, the new tokens attend to the latents
themselves with absorbed queries, as a decode kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiles.model.config import MlaConfig

# (q_nope (b, n, h, 512), q_rope (b, n, h, 64), c_kv (b, L, 512), k_rope (b, L, 64), softmax_scale)
# -> (b, n, h, 512); the queries are those of the last n tokens, and causal.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Latents:
    """What one layer caches: c_kv (b, L, 512), behind its norm; k_rope (b, L, 64), rotated."""

    c_kv: Tensor
    k_rope: Tensor

    def then(self, other: Latents) -> Latents:
        """Concatenation with later tokens' latents."""
        return Latents(
            torch.cat((self.c_kv, other.c_kv), 1), torch.cat((self.k_rope, other.k_rope), 1)
        )

    def first(self, sequences: int) -> Latents:
        return Latents(self.c_kv[:sequences], self.k_rope[:sequences])


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of pairs (2j, 2j + 1), as DeepSeek interleaves them.

    Args:
        x: (b, n, ..., d); all of it is rotated, in fp32.
        positions: (n,) int64.
    """
    d = x.shape[-1]
    inverse = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = positions.float()[:, None] * inverse
    shape = (len(positions), *(1,) * (x.ndim - 3), d // 2)
    cos, sin = angle.cos().view(shape), angle.sin().view(shape)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class MlaAttention(nn.Module):
    """Multi-head latent attention without query compression."""

    def __init__(self, config: MlaConfig) -> None:
        super().__init__()
        self.config = config
        d, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.q_proj = nn.Linear(d, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(rank, heads * per_head, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, d, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, past: Latents | None, attend: Attend | None
    ) -> tuple[Tensor, Latents]:
        """(b, n, d), and the latents of past and new tokens."""
        q = self.q_proj(x).unflatten(-1, (self.config.num_attention_heads, -1))
        q_nope, q_rope = self.parts(q, positions)
        latents = self.latents(x, positions)
        if past is not None:
            latents = past.then(latents)
        if attend is None:
            mixed = self.expanded(q_nope, q_rope, latents)
        else:
            mixed = self._absorbed(q_nope, q_rope, latents, attend)
        return self.o_proj(mixed.flatten(2)), latents

    def parts(self, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b, n, h, nope + rope) as (content, RoPE part behind its rotation)."""
        nope = self.config.qk_nope_head_dim
        return q[..., :nope], rotate(q[..., nope:], positions, self.config.rope_theta)

    def latents(self, x: Tensor, positions: Tensor) -> Latents:
        """Of the tokens x (b, n, d)."""
        config = self.config
        widths = (config.kv_lora_rank, config.qk_rope_head_dim)
        c_kv, k_rope = self.kv_a_proj_with_mqa(x).split(widths, -1)
        k_rope = rotate(k_rope, positions, config.rope_theta)
        return Latents(self.kv_a_layernorm(c_kv), k_rope.to(c_kv.dtype))

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """(W_UK (h, nope, 512), W_UV (h, v, 512))."""
        config = self.config
        both = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        return both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]

    def expanded(
        self, q_nope: Tensor, q_rope: Tensor, latents: Latents, mask: Tensor | None = None
    ) -> Tensor:
        """Attention to keys and values of each head.

        Args:
            mask: bool (n, L), what each query token sees; None: all up to itself.
        """
        n, length, heads = q_nope.shape[1], latents.c_kv.shape[1], q_nope.shape[2]
        nope = self.config.qk_nope_head_dim
        kv = self.kv_b_proj(latents.c_kv).unflatten(-1, (heads, -1))
        k_rope = latents.k_rope[:, :, None].expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        k = torch.cat((kv[..., :nope], k_rope.to(kv.dtype)), -1).transpose(1, 2)
        v = kv[..., nope:].transpose(1, 2)
        if mask is None and n < length:
            mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
        wide = v.shape[-1]
        if v.is_cuda:  # flash attention wants keys and values of one width
            v = functional.pad(v, (0, k.shape[-1] - wide))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.config.softmax_scale
        )
        return out.transpose(1, 2)[..., :wide]

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latents: Latents, attend: Attend) -> Tensor:
        up_k, up_v = self.up_projections()
        absorbed = torch.einsum("bnhd,hdc->bnhc", q_nope, up_k)
        scale = self.config.softmax_scale
        out = attend(absorbed, q_rope, latents.c_kv, latents.k_rope, scale).to(q_nope.dtype)
        return torch.einsum("bnhc,hvc->bnhv", out, up_v)


class FeedForward(nn.Module):
    def __init__(self, config: MlaConfig) -> None:
        super().__init__()
        d, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, wide, bias=False)
        self.up_proj = nn.Linear(d, wide, bias=False)
        self.down_proj = nn.Linear(wide, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: MlaConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MlaAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, positions: Tensor, past: Latents | None, attend: Attend | None
    ) -> tuple[Tensor, Latents]:
        mixed, latents = self.self_attn(self.input_layernorm(x), positions, past, attend)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), latents


class Trunk(nn.Module):
    def __init__(self, config: MlaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MlaModel(nn.Module):
    """The whole model; embedding and output share their weights."""

    def __init__(self, config: MlaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)

    def initialise(self, seed: int) -> None:
        """Normal weights of deviation 0.02, projections into the residual stream smaller."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = residual if into_residual else 0.02
                values = torch.randn(parameter.shape, generator=generator) * deviation
                parameter.data.copy_(values)

    @property
    def layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def forward(
        self,
        tokens: Tensor,
        past: list[Latents] | None = None,
        attend: Attend | None = None,
        last: int | None = None,
    ) -> tuple[Tensor, list[Latents]]:
        """Logits of new tokens, and the latents of past and new ones.

        Args:
            tokens: (b, n) int64.
            past: latents of each layer, of the tokens before.
            attend: attention over latents; None expands them to keys and values.
            last: how many tokens to give logits for; None: all n.

        Returns:
            (logits (b, last, vocabulary), latents by layer).
        """
        begin = 0 if past is None else past[0].c_kv.shape[1]
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x, latents = self.model.embed_tokens(tokens), []
        for i, layer in enumerate(self.model.layers):
            x, found = layer(x, positions, None if past is None else past[i], attend)
            latents.append(found)
        x = self.model.norm(x if last is None else x[:, x.shape[1] - last :])
        return functional.linear(x, self.model.embed_tokens.weight), latents
