"""The absorbed form of latent attention: queries go into the latent space by W_UK, results come out
of it by W_UV, both parts of ``kv_b_proj``.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def weights(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """(W_UK (h, d_nope, 512), W_UV (h, d_v, 512)): views of kv_b_proj's weight."""
    weight = module.kv_b_proj.weight.detach()
    heads = weight.view(query.shape[1], -1, weight.shape[-1])
    return heads[:, : module.qk_nope_head_dim], heads[:, module.qk_nope_head_dim :]


def queries(module: Any, query: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(b, h, n, d) -> queries (b, n, h, 512) of the latent space, RoPE parts (b, n, h, 64)."""
    b, h, n, _ = query.shape
    rows = query[..., : module.qk_nope_head_dim].transpose(0, 1).reshape(h, b * n, -1)
    latent = torch.bmm(rows, up).view(h, b, n, -1).permute(1, 2, 0, 3)
    return latent, query[..., module.qk_nope_head_dim :].transpose(1, 2)


def results(out: Tensor, down: Tensor) -> Tensor:
    """Results in the latent space (b, n, h, 512) -> (b, n, h, d_v)."""
    b, n, h, _ = out.shape
    rows = out.permute(2, 0, 1, 3).reshape(h, b * n, -1)
    return torch.bmm(rows, down.mT).view(h, b, n, -1).permute(1, 2, 0, 3)
