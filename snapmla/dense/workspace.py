"""The memory of a plan: how many units there may be, and rows of partial results."""

from __future__ import annotations

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.formats.registered import FORMATS


def unit_capacity(batch: int, s_q: int | None, total_q: int, num_heads: int, unit_rows: int) -> int:
    """Units of query rows that there may be (``snapmla.testing.reference_plan`` says why).

    Args:
        s_q: query tokens of every sequence, None with ragged queries.
        total_q: the most query tokens of all sequences together.
    """
    if s_q is None:
        return batch + total_q * num_heads // unit_rows
    return batch * -(-s_q * num_heads // unit_rows)


_PARTIAL_ROWS = {"f16": (torch.float16, PARTIAL_ROW), "f32": (torch.float32, KV_LORA_RANK)}


def partial_rows(format: str) -> tuple[torch.dtype, int]:
    """(dtype, elements) of a partial row of attention over a cache of a format."""
    return _PARTIAL_ROWS[FORMATS[format].partial]


def new_workspace(
    like: torch.Tensor, slots: int, unit_rows: int, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (o_accum, lse_accum) on the device of ``like``.

    Args:
        format: name of the cache's format.
    """
    dtype, width = partial_rows(format)
    return (
        like.new_empty((slots, unit_rows, width), dtype=dtype),
        like.new_empty((slots, unit_rows), dtype=torch.float32),
    )
