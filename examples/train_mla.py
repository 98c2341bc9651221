"""A small MLA layer trained for a few steps: gradients through ``snapmla.mha_prefill``.

    python examples/train_mla.py

Runs on a GPU if there is one, else, a few heads and tokens of it, on the software GPU.  A batch is
sequences of different lengths, packed.  K stays two tensors: kv_b_proj's output, whose views are
k_nope and v, and one RoPE head that all heads share, so that the forward concatenates nothing.  The
layer learns the answers of another one with other weights.  The first step's gradients of all
weights are compared with those of attention by torch in float64, over the same projections.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn

import snapmla

NOPE, ROPE, V = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
ON_CARD: dict[str, Any] = {
    "hidden": 1024, "heads": 16, "latent": 512, "lengths": [700, 1, 1300, 47], "steps": 20,
}  # fmt: skip
TINY: dict[str, Any] = {"hidden": 64, "heads": 2, "latent": 64, "lengths": [13, 1], "steps": 2}


class Attention(nn.Module):
    """MLA without a cache: weights in fp32, products and attention in bfloat16."""

    def __init__(self, hidden: int, heads: int, latent: int):
        super().__init__()
        self.heads, self.latent = heads, latent
        sizes = {
            "q": (hidden, heads * (NOPE + ROPE)), "kv_a": (hidden, latent + ROPE),
            "kv_b": (latent, heads * (NOPE + V)), "o": (heads * V, hidden),
        }  # fmt: skip
        self.weights = nn.ParameterDict(
            {name: torch.randn(n, m) * n**-0.5 for name, (n, m) in sizes.items()}
        )

    def project(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[name].bfloat16()

    def forward(
        self, x: Tensor, angles: Tensor, cu_seqlens: Tensor, longest: int, exact: bool
    ) -> Tensor:
        """Tokens (total, hidden) of all sequences -> the same shape."""
        q = self.project("q", x).view(-1, self.heads, NOPE + ROPE)
        q = torch.cat([q[..., :NOPE], rotated(q[..., NOPE:], angles[:, None])], -1)
        latent, k_rope = self.project("kv_a", x).split([self.latent, ROPE], -1)
        k_rope = rotated(k_rope, angles)[:, None]  # one head
        kv = self.project("kv_b", latent).view(-1, self.heads, NOPE + V)
        k_nope, v = kv.split([NOPE, V], -1)  # views, whose gradients are joined once
        if exact:
            out = by_torch(q, k_nope, k_rope, v, cu_seqlens)
        else:
            out, _ = snapmla.mha_prefill(
                q, k_nope, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=SCALE,
                k_rope=k_rope,
            )  # fmt: skip
        return self.project("o", out.flatten(1))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE of channels i and i + 32."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def by_torch(q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention of each sequence in float64, rounded once."""
    parts = []
    for first, end in itertools.pairwise(cu_seqlens.tolist()):
        rows = slice(first, end)
        k = torch.cat([k_nope[rows], k_rope[rows].expand(-1, q.shape[1], -1)], -1).double()
        logits = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * SCALE
        hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
        p = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", p, v[rows].double()))
    return torch.cat(parts).to(q.dtype)


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    size = ON_CARD if device == "cuda" else TINY
    lengths, shape = size["lengths"], [size[name] for name in ("hidden", "heads", "latent")]
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    angles = positions[:, None] * 1e4 ** (-torch.arange(ROPE // 2, device=device) / (ROPE // 2))
    x = torch.randn(len(positions), size["hidden"], device=device).bfloat16()
    where = (angles, cu_seqlens, max(lengths))

    layer, teacher = (Attention(*shape).to(device) for _ in range(2))
    with torch.no_grad():  # a call without gradients, whose backward nobody pays for
        wanted = teacher(x, *where, False).float()

    def loss(exact: bool = False) -> Tensor:
        return (layer(x, *where, exact).float() - wanted).square().mean()

    weights = layer.weights
    mine, theirs = (
        torch.autograd.grad(loss(exact), list(weights.values())) for exact in (False, True)
    )
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs)]
    said = ", ".join(f"{name} {error:.1e}" for name, error in zip(weights, errors))
    print(f"relative L2 to gradients by torch in float64, on {device}: {said}")

    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3 if device == "cpu" else 3e-4)
    losses = []
    for _ in range(size["steps"]):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    with torch.no_grad():
        losses.append(float(loss()))
    print(f"loss of {size['steps']} steps: {losses[0]:.4f} to {losses[-1]:.4f}")
    right = max(errors) < 1.5e-2 and losses[-1] < 0.95 * losses[0]
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
