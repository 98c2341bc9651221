"""Fields of public models' ``config.json`` that say which kernels their attention needs."""

from __future__ import annotations

from typing import Any

_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

# Heads are all that the model has: one GPU's share is fewer.
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {"model_type": "deepseek_v2", "num_attention_heads": 16, **_MLA},
    "DeepSeek-V3.2": {
        "model_type": "deepseek_v32", "num_attention_heads": 128, **_MLA,
        "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    },
    "DeepSeek-V4-Flash": {
        "model_type": "deepseek_v4", "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    },
    "GLM-5": {
        "model_type": "glm_moe_dsa", "num_attention_heads": 64, **_MLA, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    },
    "Kimi-K2": {"model_type": "kimi_k2", "num_attention_heads": 64, **_MLA},
}  # fmt: skip
