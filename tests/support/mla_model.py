"""A small MLA model with the kernels' latent."""

from __future__ import annotations

import torch
from torch import Tensor

from profiles.model.config import MlaConfig
from profiles.model.model import MlaModel

CONFIG = MlaConfig(
    vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=64,
)  # fmt: skip


def small_model(seed: int = 0, spread: float = 8.0) -> MlaModel:
    """Random weights, ``spread`` times as large as before training: attention that picks."""
    model = MlaModel(CONFIG)
    model.initialise(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= spread
    return model.eval().requires_grad_(False)


def some_tokens(n: int, seed: int = 0, sequences: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 257, (sequences, n), generator=generator)
