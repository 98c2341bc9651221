"""``DecodePlan``: who computes what in one decode step, as device tensors.

The lengths stay on the device: the host only knows capacities, so a plan is made (and updated in
place) without synchronisation, and one plan serves all layers of a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dsl_kernels.spec import (
    KV_LORA_RANK,
    TOKEN_TILE,
    VariantSpec,
)
from snapmla import checks, dispatch, runtime

DEFAULT_FIXED_OVERHEAD = 4  # token tiles that starting an item costs (prologue, epilogue, merge)
SOFTGPU_SMS = 4  # the software GPU counts as this many SMs: enough parts to split and merge


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Work list and workspace of one decode step; made by ``plan_decode``.

    A *part* is one CTA (or one cluster, for 128 rows); it walks its items.  A sequence cut into
    several items writes normalised partial results to slots, which ``merge`` combines in order.

    Attributes:
        work_items: int32 (parts + b, 4): sequence, first tile, end tile, slot (-1: not split).
        part_begin: int32 (parts + 1,): items of part p are [part_begin[p], part_begin[p + 1]).
        split_begin: int32 (b + 1,): slots of sequence i are [split_begin[i], split_begin[i + 1]).
        o_accum: float32 (2 * parts, rows_pad, 512).
        lse_accum: float32 (2 * parts, rows_pad), log2.
        batch, num_heads, s_q: the step's shape.
        page_size, max_pages: of the cache and of the block table; longer sequences are clamped to
            ``max_pages * page_size`` tokens.
        num_parts: CTAs (or clusters) per row block that share the tokens.
        pipeline, row_tile: which decode kernel the plan is for.
        fixed_overhead: cost of one item beside its tiles, in tiles.
    """

    work_items: torch.Tensor
    part_begin: torch.Tensor
    split_begin: torch.Tensor
    o_accum: torch.Tensor
    lse_accum: torch.Tensor
    batch: int
    num_heads: int
    s_q: int
    page_size: int
    max_pages: int
    num_parts: int
    pipeline: str
    row_tile: int
    fixed_overhead: int

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.num_heads * self.s_q

    @property
    def device(self) -> torch.device:
        return self.work_items.device

    @property
    def may_split(self) -> bool:
        """False only if the shapes rule out that any sequence is split."""
        return self.num_parts > 1 and self.max_pages * self.page_size > TOKEN_TILE

    def update_(self, cache_seqlens: torch.Tensor) -> DecodePlan:
        """Plans anew for other lengths, in place: one launch, no sync, no allocation.

        Args:
            cache_seqlens: int32 (b,), the same b; what lies beyond the block table is clamped.

        Returns:
            This plan.
        """
        checks.lengths(cache_seqlens, self.batch, self.device)
        if self.batch:
            _plan_kernel(self.device)(
                cache_seqlens,
                self.work_items,
                self.part_begin,
                self.split_begin,
                self.max_pages * self.page_size,
                TOKEN_TILE,
                self.fixed_overhead,
            )
        return self

    def with_workspace(self, o_accum: torch.Tensor, lse_accum: torch.Tensor) -> DecodePlan:
        """The same plan over another workspace of the same shapes (one per concurrent stream)."""
        device = self.device
        shape = tuple(self.o_accum.shape)
        checks.output("o_accum", o_accum, (torch.float32,), shape, device)
        checks.output("lse_accum", lse_accum, (torch.float32,), shape[:2], device)
        return replace(self, o_accum=o_accum, lse_accum=lse_accum)


@functools.lru_cache(maxsize=64)
def _plan_kernel(device: torch.device) -> runtime.Kernel:
    spec = VariantSpec(op="plan_decode", arch=runtime.arch_of(device))
    return runtime.kernel(spec, device.type)


runtime.on_forget(_plan_kernel.cache_clear)


@functools.lru_cache(maxsize=64)
def _sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return SOFTGPU_SMS


def default_num_parts(device: torch.device, rows: int, row_tile: int) -> int:
    """Parts that fill the device: SMs / (row blocks * CTAs per block), at least 1."""
    return dispatch.parts_of(_sm_count(device), rows, row_tile)


def plan_decode(
    cache_seqlens: torch.Tensor,
    num_heads: int,
    s_q: int,
    *,
    page_size: int,
    max_pages: int,
    num_parts: int | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
    fixed_overhead: int | None = None,
) -> DecodePlan:
    """Plans one decode step on the device of ``cache_seqlens``; share it between layers.

    Args:
        cache_seqlens: int32 (b,), tokens in the cache per sequence, the new ones included.
        num_heads: 1 to 128.
        s_q: query tokens per sequence, 1 to 8.
        page_size: of the cache: 16, 32, 64 or 128.
        max_pages: width of the block table that ``decode`` will get, exactly.
        num_parts: None fills the device.
        pipeline: ``etap`` or ``dual_wg``; None lets the dispatcher choose.
        row_tile: query rows per CTA or cluster (16, 32, 64, 128); None lets the dispatcher choose
            (``snapmla.explain`` lists the candidates).
        fixed_overhead: cost of starting an item, in 64-token tiles.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the planning kernel is not there.
    """
    checks.lengths(cache_seqlens, "b")
    checks.num_heads(num_heads)
    checks.s_q(s_q)
    checks.page_size(page_size)
    checks.integer("max_pages", max_pages, 1, 2**31 // page_size - 1)
    rows, device, batch = num_heads * s_q, cache_seqlens.device, cache_seqlens.shape[0]
    pipeline, row_tile = dispatch.choose(
        device, num_heads, s_q, page_size, pipeline=pipeline, row_tile=row_tile
    )
    if num_parts is None:
        num_parts = default_num_parts(device, rows, row_tile)
    checks.integer("num_parts", num_parts, 1, 65535)
    if fixed_overhead is None:
        fixed_overhead = DEFAULT_FIXED_OVERHEAD
    checks.integer("fixed_overhead", fixed_overhead, 0, 1 << 16)
    rows_pad = -(-rows // row_tile) * row_tile

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    plan = DecodePlan(
        work_items=ints(num_parts + batch, 4),
        part_begin=ints(num_parts + 1),
        split_begin=ints(batch + 1),
        o_accum=floats(2 * num_parts, rows_pad, KV_LORA_RANK),
        lse_accum=floats(2 * num_parts, rows_pad),
        batch=batch,
        num_heads=num_heads,
        s_q=s_q,
        page_size=page_size,
        max_pages=max_pages,
        num_parts=num_parts,
        pipeline=pipeline,
        row_tile=row_tile,
        fixed_overhead=fixed_overhead,
    )
    return plan.update_(cache_seqlens)
