"""Which kernel of ``sparse_prefill`` serves a call over BF16 rows."""

from __future__ import annotations

import functools

import torch

from dsl_kernels.spec import VariantSpec
from snapmla import runtime

ROW_TILES = (16, 32, 64)  # heads that a CTA computes


def row_tile_of(heads: int) -> int:
    """Heads of a CTA, for so many of a call: the fewest that hold them, or 64."""
    return next((rows for rows in ROW_TILES if rows >= heads), ROW_TILES[-1])


@functools.lru_cache(maxsize=64)
def kernel_of(
    device: torch.device, row_tile: int, d_qk: int, figures: str = "whole", lists: str = "one"
) -> runtime.Kernel:
    """The exported function; the last two are axes of the family ``sparse_prefill``."""
    spec = VariantSpec(
        op="sparse_prefill", arch=runtime.arch_of(device), row_tile=row_tile, d_qk=d_qk,
        figures=figures, lists=lists,
    )  # fmt: skip
    return runtime.kernel(spec, device.type)


runtime.on_forget(kernel_of.cache_clear)
