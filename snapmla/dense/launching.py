"""The launch of the planning kernel, and the scalars that it takes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import launch, variants


class PlanNumbers(NamedTuple):
    """Scalars of the planning kernel and of ``torch.ops.snapmla.plan_update``, in their order.

    Attributes:
        max_tokens: of a sequence; longer ones are cut there.
        token_tile, fixed_overhead, split_tiles, longest_item, max_stretches, tile_ns, read_ns,
            unit_rows, causal: as of a ``DecodePlan``.
        num_heads: rows of a query token.
        s_q: query tokens of a sequence; of all together, if ragged.
    """

    max_tokens: int
    token_tile: int
    fixed_overhead: int
    split_tiles: int
    longest_item: int
    max_stretches: int
    tile_ns: int
    read_ns: int
    num_heads: int
    s_q: int
    unit_rows: int
    causal: bool


def launch_plan(
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    row_seqlens: torch.Tensor | None,
    *rest: Any,
) -> None:
    """Launches the planning kernel on checked arguments.

    Args:
        row_seqlens: (tokens,).
        rest: the tables that are written, and ``PlanNumbers``.
    """
    device = cache_seqlens.device
    _plan_kernel(device)(
        cache_seqlens,
        launch.nothing(device) if cu_seqlens_q is None else cu_seqlens_q,
        launch.nothing(device) if row_seqlens is None else row_seqlens,
        *rest[:-1],
        int(rest[-1]),
    )


@functools.lru_cache(maxsize=64)
def _plan_kernel(device: torch.device) -> variants.Kernel:
    spec = VariantSpec(op="plan_decode", arch=variants.arch_of(device))
    return variants.kernel(spec, device.type)


variants.on_forget(_plan_kernel.cache_clear)
