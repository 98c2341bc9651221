"""Checks of sparse decode's lists and lengths, over any cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsl_kernels.formats.registered import FORMATS
from snapmla import checks

MAX_STRIDE = 1 << 32  # bytes between pages or tokens: the gather's strides have 32 bits


def read() -> str:
    """The caches of sparse decode, for messages."""
    names = " or ".join(repr(n) for n, each in FORMATS.items() if each.sparse and each.named)
    return f"an FP8 cache, one of format {names} or bfloat16 rows"


def check_indices(
    indices: torch.Tensor,
    rows: tuple[int, ...],
    topk: int | None,
    device: torch.device,
    name: str = "indices",
) -> None:
    """int32 (b, s_q, topk) or (total_q, topk); entries of a row lie side by side, rows anywhere.

    Args:
        topk: the plan's; None: any.
        name: of the argument.
    """
    width: Any = "topk" if topk is None else topk
    checks.tensor(name, indices, (torch.int32,), (*rows[:-1], width), device)
    if indices.shape[-1] < 1:
        checks.value_error(name, "a width of 1 or more entries", indices.shape[-1])
    if indices.shape[-1] > 1 and indices.stride(-1) != 1:
        checks.value_error(name, "innermost stride 1", f"strides {indices.stride()}")


def check_lengths(
    topk_length: torch.Tensor | None, batch: int, device: torch.device
) -> torch.Tensor | None:
    """int32 (b,), as it is; None is all entries."""
    if topk_length is not None:
        checks.tensor("topk_length", topk_length, (torch.int32,), (batch,), device)
        checks.contiguous("topk_length", topk_length)
    return topk_length


def check_reach(parts: Mapping[str, torch.Tensor]) -> None:
    """Checks that the gather's 32 bits reach all tokens of a cache's tensors.

    Called for real tensors: if a tracer records the call, the operator checks when it runs.

    Args:
        parts: the tensors, (pages, page_size, ...), by their names in messages.
    """
    for name, part in parts.items():
        if max(part.stride()[:2], default=0) * part.element_size() >= MAX_STRIDE:
            wanted = "pages and tokens less than 4 GiB apart"
            checks.value_error(name, wanted, f"strides {part.stride()}")
        num_slots = part.shape[0] * part.shape[1]
        if num_slots >= 1 << 31:
            checks.value_error(name, "less than 2**31 tokens", num_slots)
