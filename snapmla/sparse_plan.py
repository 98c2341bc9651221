"""Plans of sparse decode: every query token is a unit of its own, over a list of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dsl_kernels.families.sparse_decode import ROW_TILES
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import checks, dispatch, runtime
from snapmla.decode_plan import NAMES, DecodePlan, PlanVariant, new_workspace
from snapmla.plan import PlanOptions, StepShape, default_num_parts, make_plan

PIPELINE = "etap"
# Two row blocks a token, of few tokens: more parts make more partial rows than their tiles save
# (a token of 2048, 128 heads: 44 parts 12.2 us, 66 parts 14.4 us on an H200).
FEW_BLOCKS, PARTS_OF_FEW = 4, 44


class SparseVariant(PlanVariant):
    """What chooses the kernel of a sparse plan."""

    def kernel(self, out_dtype: torch.dtype) -> runtime.Kernel:
        """The exported function that writes ``out_dtype``, loaded once."""
        if out_dtype not in self.out_dtypes:
            wanted = " or ".join(checks.dtype_name(d) for d in self.out_dtypes)
            checks.type_error("out", f"dtype {wanted}", checks.dtype_name(out_dtype))
        arch = runtime.arch_of(self.device)
        spec = sparse_spec(arch, self.row_tile, NAMES[out_dtype], self.p_terms)
        self.kernels[out_dtype] = runtime.kernel(spec, self.device.type)
        return self.kernels[out_dtype]


class SparsePlan(DecodePlan):
    """A ``DecodePlan`` of sparse decode: ``max_pages`` is the width of ``indices`` and ``page_size``
    1, whatever the cache's pages; a unit is one query token, ``unit_rows`` are its heads.

    ``planned_seqlens`` are the lengths of ``topk_length``: where that is not given a decode reads
    them instead.
    """

    @functools.cached_property
    def variant(self) -> PlanVariant:
        """What chooses the decode kernel."""
        return _variant(self.device, self.row_tile, self.p_terms)

    def must_regroup(self) -> bool:
        """Never: kernels see the caller's pages."""
        return False

    @property
    def topk(self) -> int:
        """Width of ``indices``."""
        return self.max_pages


@dataclass(frozen=True, kw_only=True)
class SparseOptions(PlanOptions):
    """``PlanOptions`` of sparse plans."""

    page_size: int = 1
    causal: bool = False

    def _checked_page_size(self) -> int:
        """An entry of ``indices`` names one token."""
        return checks.integer("page_size", self.page_size, 1, 1)

    def kernel(self, device: torch.device, s_q: int) -> VariantSpec:
        """The kernel of the smallest row tile that takes all heads, or of the largest."""
        fits = (tile for tile in ROW_TILES if tile >= self.num_heads)
        tile = next(fits, ROW_TILES[-1]) if self.row_tile is None else self.row_tile
        checks.choice("row_tile", tile, ROW_TILES)
        return sparse_spec(runtime.arch_of(device), tile, "bf16", dispatch.p_terms_of(self.accuracy))

    def unit_rows(self, device: torch.device, rows: int, spec: VariantSpec) -> int:
        """A query token's."""
        return self.num_heads

    def parts(self, device: torch.device, unit_rows: int, units: int, spec: VariantSpec) -> int:
        """As many as fill the device, fewer for a few tokens of several row blocks."""
        most, blocks = default_num_parts(device, unit_rows, spec), -(-unit_rows // spec.row_tile)
        few = blocks > 1 and units * blocks <= FEW_BLOCKS
        return min(most, PARTS_OF_FEW) if few else most

    def tile_times(self, device: torch.device, spec: VariantSpec) -> tuple[int, int]:
        """Those of the kernel over pages, whose math is the same."""
        return dispatch.tile_times(device, decode_spec(spec.pipeline, spec.row_tile, 64, "bf16"))


def sparse_spec(arch: str, row_tile: int, out_dtype: str, p_terms: int = 1) -> VariantSpec:
    """The variant of these choices."""
    return VariantSpec(
        op="sparse_decode", arch=arch, pipeline=PIPELINE, row_tile=row_tile, out_dtype=out_dtype,
        p_terms=p_terms,
    )  # fmt: skip


_variants: dict[tuple[torch.device, int, int], SparseVariant] = {}


def _variant(device: torch.device, row_tile: int, p_terms: int) -> SparseVariant:
    """The one of these values."""
    made = SparseVariant(device, PIPELINE, row_tile, 1, p_terms=p_terms, cache_dtype="fp8")
    return _variants.setdefault((device, row_tile, p_terms), made)


def _forget() -> None:
    for variant in _variants.values():
        variant.kernels.clear()


runtime.on_forget(_forget)


def plan_sparse(
    options: SparseOptions,
    topk: int,
    s_q: int | None,
    topk_length: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    row_lengths: torch.Tensor | None = None,
) -> SparsePlan:
    """The plan of a step; ``update_(topk_length, cu_seqlens_q, row_lengths)`` plans it anew.

    Args:
        options: what a model's steps have in common.
        topk: width of ``indices``.
        s_q: query tokens of every sequence; None with ``cu_seqlens_q`` and ``total_q``.
        topk_length: int32 (b,), how many entries of its query tokens' rows count; where all do, b
            times ``topk``: such a plan need not be updated.
        row_lengths: int32 (b, s_q) or (total_q,): the same for each query token, beside that.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    shape = StepShape(s_q, topk, total_q)
    plan = make_plan(
        options, new_workspace, topk_length, shape, cu_seqlens_q, row_lengths, made=SparsePlan
    )
    assert isinstance(plan, SparsePlan)
    return plan
