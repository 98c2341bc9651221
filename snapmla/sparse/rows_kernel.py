"""Choice of the kernel of ``sparse_prefill`` that serves a call over BF16 rows."""

from __future__ import annotations

import functools

import torch

from dsl_kernels.families.sparse_prefill import ROW_TILES, row_tile_of, split_row_tile_of
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants

__all__ = ["ROW_TILES", "kernel_of", "row_tile_of", "split_row_tile_of"]


@functools.lru_cache(maxsize=64)
def kernel_of(
    device: torch.device,
    row_tile: int,
    d_qk: int,
    figures: str = "whole",
    lists: str = "one",
    query: str = "one",
) -> variants.Kernel:
    """The exported function; the last three are axes of the family ``sparse_prefill``."""
    spec = VariantSpec(
        op="sparse_prefill", arch=variants.arch_of(device), row_tile=row_tile, d_qk=d_qk,
        figures=figures, lists=lists, query=query,
    )  # fmt: skip
    return variants.kernel(spec, device.type)


variants.on_forget(kernel_of.cache_clear)
