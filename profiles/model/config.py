"""Sizes: what a model is (in DeepSeek-V3's keys), and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """An MLA transformer with dense feed-forward layers, named as DeepSeek-V3's configuration.

    The latent is 512 wide and RoPE 64 at every size, because the kernels take nothing else.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16_384

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.qk_head_dim**-0.5)

    @property
    def parameters(self) -> int:
        """Trained numbers; the embedding is shared with the output and counts once."""
        d, heads, latent = self.hidden_size, self.num_attention_heads, self.kv_lora_rank
        attention = d * heads * self.qk_head_dim + d * (latent + self.qk_rope_head_dim)
        attention += latent * heads * (self.qk_nope_head_dim + self.v_head_dim)
        attention += heads * self.v_head_dim * d + latent
        layer = attention + 3 * d * self.intermediate_size + 2 * d
        return self.num_hidden_layers * layer + (self.vocab_size + 1) * d

    def deepseek_v3(self) -> dict[str, Any]:
        """``config.json`` of a DeepSeek-V3 whose layers are all dense, as engines read it."""
        return asdict(self) | {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "q_lora_rank": None,
            "num_key_value_heads": self.num_attention_heads,
            "first_k_dense_replace": self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_interleave": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MlaConfig:
        """Of a ``config.json``; keys that it does not know are left."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
