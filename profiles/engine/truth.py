"""The model in torch, along the tokens that an engine wrote: exact in fp32, and fake-quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profiles.model.attention import attend_plainly, backends
from profiles.model.model import Attend, MlaModel


@torch.no_grad()
def log_probabilities(
    model: MlaModel, prompts: Sequence[list[int]], ids: Sequence[list[int]], attend: Attend
) -> Tensor:
    """(prompts, new tokens, vocabulary) fp32, of each step along the given tokens.

    A prompt is prefilled with exact attention, as engines do; the tokens behind it go through
    ``attend``.
    """
    device = next(model.parameters()).device
    rows = []
    for prompt, written in zip(prompts, ids, strict=True):
        first, past = model(torch.tensor([prompt], device=device), last=1)
        rest, _ = model(torch.tensor([written[:-1]], device=device), past, attend)
        logits = torch.cat((first, rest), 1)[0]
        rows.append(logits.float().log_softmax(-1).cpu())
    return torch.stack(rows)


def references(
    model: MlaModel, prompts: Sequence[list[int]], ids: Sequence[list[int]], device: torch.device
) -> dict[str, Tensor]:
    """``fp32``: the truth; ``bf16``: its noise; ``fake``: bf16 with fake-quantised attention."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {"fp32": log_probabilities(model.float().to(device), prompts, ids, attend_plainly)}
    narrow = model.bfloat16()
    for name, attention in (("bf16", "bf16"), ("fake", "ours")):
        (backend,) = backends([attention], device, None)
        assert backend.attend is not None
        found[name] = log_probabilities(narrow, prompts, ids, backend.attend)
    return found


def divergence(logs: Tensor, truth: Tensor) -> dict[str, float]:
    """Mean and largest KL(truth || logs) in nats over all rows, and the part of equal best tokens.

    Args:
        logs, truth: (prompts, steps, vocabulary) log-probabilities.
    """
    kl = (truth.double().exp() * (truth.double() - logs.double())).sum(-1)
    same = logs.argmax(-1) == truth.argmax(-1)
    return {
        "kl": float(kl.mean()), "worst": float(kl.max()), "agree": float(same.double().mean()),
    }  # fmt: skip


def equal_until(ids: Sequence[list[int]], others: Sequence[list[int]]) -> list[int]:
    """Of each prompt, the first step whose tokens differ; all steps if none does."""
    return [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(ids, others, strict=True)
    ]
