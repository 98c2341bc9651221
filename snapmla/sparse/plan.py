"""Plans of sparse decode: every query token is a unit of its own, over a list of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, overload

import torch

from dsl_kernels.formats.registered import DEFAULT, FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import checks, rank
from snapmla.call import tracing
from snapmla.dense import NAMES, DecodePlan, PlanVariant, new_workspace
from snapmla.dense.plan_decode import PlanOptions, StepShape, make_plan
from snapmla.runtime import variants
from snapmla.runtime.launch import sm_count
from snapmla.sparse.rows_plan import MAX_TOPK, SparseRowsPlan, plan_rows


class SparseVariant(PlanVariant):
    """Choice of a sparse plan's kernel."""

    def kernel(self, out_dtype: torch.dtype) -> variants.Kernel:
        """The exported function that writes ``out_dtype``, loaded once."""
        if out_dtype not in self.out_dtypes:
            wanted = " or ".join(checks.dtype_name(d) for d in self.out_dtypes)
            checks.type_error("out", f"dtype {wanted}", checks.dtype_name(out_dtype))
        arch = variants.arch_of(self.device)
        spec = sparse_spec(
            arch, self.row_tile, NAMES[out_dtype], self.p_terms, cache=self.format,
            pipeline=self.pipeline,
        )  # fmt: skip
        self.kernels[out_dtype] = variants.kernel(spec, self.device.type)
        return self.kernels[out_dtype]


# What a plan's work list calls the arguments.
AS_PLANNED = {"cache_seqlens": "topk_length", "row_seqlens": "row_lengths"}


class SparsePlan(DecodePlan):
    """A ``DecodePlan`` of sparse decode: ``max_pages`` is the width of ``indices``, ``page_size``
    is 1, whatever the cache's; a unit is one query token, ``unit_rows`` are its heads.

    ``planned_seqlens`` are the lengths of ``topk_length``: where that is not given a decode reads
    them instead.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: our own, as ``DecodePlan``: a query token's row of ``indices`` is a block table of pages
    of one token.
    """

    _STALE: ClassVar[tuple[str, str]] = (
        "plan", "call plan.update_(topk_length) once after the lengths change",
    )  # fmt: skip
    _ROWS: ClassVar[str] = "row_lengths"

    def update_(  # as DecodePlan's, which calls these by other names
        self,
        topk_length: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        row_lengths: torch.Tensor | None = None,
    ) -> SparsePlan:
        """Plans anew for other lengths, in place, as ``DecodePlan.update_``: one launch.

        Args:
            topk_length: int32 (b,), the same b; what lies beyond ``topk`` is clamped.
            cu_seqlens_q: int32 (b + 1,), needed with ragged queries.
            row_lengths: int32 (b, s_q), or (total_q,) with ragged queries, of a plan that was made
                with such.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if topk_length is None:
            checks.type_error("topk_length", "an int32 tensor (b,)", "None")
        try:
            super().update_(topk_length, cu_seqlens_q, row_lengths)
        except (TypeError, ValueError) as error:
            raise checks.renamed(error, AS_PLANNED, advise=True) from None
        return self

    @functools.cached_property
    def variant(self) -> PlanVariant:
        """Choice of the decode kernel."""
        return variant_of(self.device, self.pipeline, self.row_tile, self.p_terms, self.cache_dtype)

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

    def kernel(self, device: torch.device, s_q: int, size: rank.Size | None = None) -> VariantSpec:
        """The kernel that the dispatcher names; with ``fixed_split_tokens`` however many query
        tokens there are, as each row tile rounds in its own way, and where a graph is traced for
        any number of them."""
        known = size is not None and isinstance(size.batch, int) and isinstance(size.seqlen, int)
        return rank.choose_sparse(
            rank.card_of(device), self.num_heads, pipeline=self.pipeline,
            row_tile=self.row_tile, accuracy=self.accuracy, cache=self.format,
            size=size if known and self.fixed_split_tokens is None else None,
        )  # fmt: skip

    def unit_rows(self, device: torch.device, rows: int, spec: VariantSpec) -> int:
        """A query token's."""
        return self.num_heads

    def parts(self, device: torch.device, unit_rows: int, units: int, spec: VariantSpec) -> int:
        """Number of parts that fill the device; fewer for a few tokens of several row blocks."""
        return rank.parts_of_lists(sm_count(device), unit_rows, units, spec)


def sparse_spec(
    arch: str,
    row_tile: int,
    out_dtype: str,
    p_terms: int = 1,
    *,
    cache: str = DEFAULT,
    pipeline: str | None = None,
) -> VariantSpec:
    """The variant of these choices.

    Args:
        cache: its format.
        pipeline: None: that of the cache there.
    """
    return VariantSpec(
        op="sparse_decode", arch=arch, pipeline=pipeline or rank.pipeline_of(arch, cache),
        row_tile=row_tile,
        out_dtype=out_dtype, p_terms=p_terms, cache_dtype=cache,
    )  # fmt: skip


_variants: dict[tuple[torch.device, str, int, int, str], SparseVariant] = {}


def variant_of(
    device: torch.device, pipeline: str, row_tile: int, p_terms: int, cache: str
) -> PlanVariant:
    """The one of these values.

    Args:
        cache: its format.
    """
    made = SparseVariant(device, pipeline, row_tile, 1, p_terms=p_terms, format=cache)
    return _variants.setdefault((device, pipeline, row_tile, p_terms, cache), made)


def _forget() -> None:
    for variant in _variants.values():
        variant.kernels.clear()


variants.on_forget(_forget)


def plan_sparse(
    options: SparseOptions,
    topk: int,
    s_q: int | None,
    topk_length: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    row_lengths: torch.Tensor | None = None,
    full: bool = False,
) -> SparsePlan:
    """The plan of a step; ``update_(topk_length, cu_seqlens_q, row_lengths)`` plans it anew.

    Args:
        options: what a model's steps have in common.
        topk: width of ``indices``.
        s_q: query tokens of every sequence; None with ``cu_seqlens_q`` and ``total_q``.
        topk_length: int32 (b,), how many entries of its query tokens' rows count; where all do, b
            times ``topk``: such a plan need not be updated.
        row_lengths: int32 (b, s_q) or (total_q,): the same for each query token, beside that.
        full: whether all entries count, of every row.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    shape = StepShape(s_q, topk, total_q, full)
    plan = make_plan(
        options, new_workspace, topk_length, shape, cu_seqlens_q, row_lengths, made=SparsePlan
    )
    assert isinstance(plan, SparsePlan)
    return plan


@overload
def plan_sparse_decode(  # type: ignore[overload-overlap]  # "bf16" is a str, too
    num_heads: int, s_q: int | None = ..., *, topk: int, topk_length: torch.Tensor | None = ...,
    batch: int | None = ..., device: torch.device | str | int | None = ...,
    num_parts: int | None = ..., row_tile: int | None = ..., fixed_split_tokens: int | None = ...,
    check_stale: bool | None = ..., cache_dtype: Literal["bf16"],
) -> SparseRowsPlan: ...  # fmt: skip


@overload
def plan_sparse_decode(  # type: ignore[overload-overlap]
    num_heads: int, s_q: int | None = ..., *, topk: int, topk_length: torch.Tensor | None = ...,
    batch: int | None = ..., device: torch.device | str | int | None = ...,
    num_parts: int | None = ..., row_tile: int | None = ..., fixed_split_tokens: int | None = ...,
    check_stale: bool | None = ..., format: Literal["bf16"],
) -> SparseRowsPlan: ...  # fmt: skip


@overload
def plan_sparse_decode(
    num_heads: int, s_q: int | None = ..., *, topk: int, topk_length: torch.Tensor | None = ...,
    batch: int | None = ..., device: torch.device | str | int | None = ...,
    cu_seqlens_q: torch.Tensor | None = ..., total_q: int | None = ..., num_parts: int | None = ...,
    pipeline: str | None = ..., row_tile: int | None = ..., fixed_overhead: int | None = ...,
    fixed_split_tokens: int | None = ..., check_stale: bool | None = ..., accuracy: str = ...,
    cache_dtype: str | torch.dtype = ..., format: str | torch.dtype | None = ...,
) -> SparsePlan: ...  # fmt: skip


def plan_sparse_decode(
    num_heads: int,
    s_q: int | None = None,
    *,
    topk: int,
    topk_length: torch.Tensor | None = None,
    batch: int | None = None,
    device: torch.device | str | int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    num_parts: int | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
    fixed_overhead: int | None = None,
    fixed_split_tokens: int | None = None,
    check_stale: bool | None = None,
    accuracy: str = "standard",
    cache_dtype: str | torch.dtype = checks.UNSAID,
    format: str | torch.dtype | None = None,
) -> SparsePlan | SparseRowsPlan:
    """Plans ``decode(..., indices=)``; share the plan between the layers of a step.

    Without ``topk_length`` a plan depends on shapes alone: one serves every step of these shapes.
    With ``topk_length`` short lists (two tiles, of V4's window) are not cut unless ``num_parts`` or
    ``fixed_split_tokens`` ask for it: the host cannot know if they are full.

    Args:
        num_heads: 1 to 128.
        s_q: query tokens of every sequence, 1 or more; None with ``cu_seqlens_q``.
        topk: entries of a query token's row of ``indices``, 1 or more.
        topk_length: int32 (b,): how many entries of each row of a sequence count, the first ones;
            None: all.  0 is fine, and what is beyond ``topk`` is clamped.
        batch: sequences b, where no ``topk_length`` says it.
        device: where the step runs, where no ``topk_length`` says it.
        cu_seqlens_q: ragged queries, int32 (b + 1,), as in ``plan_decode``.
        total_q: room for ragged query tokens.
        num_parts: CTAs that share the entries, per row block of a query token; None fills the
            device.
        pipeline: ``etap`` or ``f16``, of caches of bytes ``mix16``, of ``fp8_ds_mla`` also
            ``mix8``, on SM100 ``ws``; None lets the dispatcher choose.
        row_tile: query heads of a CTA (16, 32, 64; on SM100 64); None lets the dispatcher choose,
            by times measured for calls of this size: query tokens, heads and entries.  With
            ``fixed_split_tokens`` the size has no part in it.
            ``snapmla.explain(num_heads, topk=...)`` lists the candidates.
        fixed_overhead: cost of starting an item, in tiles of 64 entries.
        fixed_split_tokens: batch-invariant mode, as in ``plan_decode``: each row is cut after so
            many entries, a multiple of 64, whatever else is in the batch.
        check_stale: as in ``plan_decode``.
        accuracy: ``standard``; ``high``, as in ``plan_decode``, of an ``fp8`` cache (products of
            caches of bytes have 16 bits anyway); or ``fast``, of ``fp8_ds_mla`` on SM90: where the
            dispatcher takes 64 query heads a CTA, kernels (pipeline ``mix8``) whose content logits
            are FP8 products of a query that is rounded to e4m3, a row times a power of two.  Then
            the LSE of that query is off by no more than the tensor core's sums may be,
            ``snapmla.testing.record_qk.bounds``: at most 3.4e-2 of the largest logit's sum of
            magnitudes; what rounding the query costs is beside that (docs/numerics.md).  These
            kernels are compiled when they are asked for.
        format: of the cache that ``decode`` will get: ``fp8``; ``fp8_ds_mla``, rows of 656 bytes;
            ``fp8_v4``, DeepSeek V4's pages; ``fp8_v41_planar``, ``fp8_v41_rows``,
            ``fp8_nope``, tokens of 528 bytes; or ``bf16`` (torch.bfloat16), whose plan depends on
            shapes alone: with it go ``topk_length`` for its batch, ``num_parts``, ``row_tile``,
            ``fixed_split_tokens``; ragged query tokens are sequences of one token there.
        cache_dtype: older name of ``format``; give one of the two.

    Returns:
        The plan; a ``SparseRowsPlan`` of a BF16 cache.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the planning kernel is not there.

    Example:
        plan = snapmla.plan_sparse_decode(16, 1, topk=64, batch=2, device="cpu", format="fp8")
        print(plan.explain())

    Source: the work list is ``plan_decode``'s: the row of a query token is a block table of pages
    of one token.
    """
    if tracing.by_dynamo():
        return tracing.between_graphs(
            plan_sparse_decode, num_heads, s_q, topk=topk, topk_length=topk_length, batch=batch,
            device=device, cu_seqlens_q=cu_seqlens_q, total_q=total_q, num_parts=num_parts,
            pipeline=pipeline, row_tile=row_tile, fixed_overhead=fixed_overhead,
            fixed_split_tokens=fixed_split_tokens, check_stale=check_stale, accuracy=accuracy,
            cache_dtype=cache_dtype, format=format,
        )  # fmt: skip
    name, value = checks.given_format(format, cache_dtype)
    record = FORMATS.get(checks.format_wished(value))
    if record is not None and record.lists_of_rows:
        return _plan_of_rows(
            num_heads, s_q, topk, topk_length, batch, device, check_stale,
            (("cu_seqlens_q", cu_seqlens_q), ("total_q", total_q), ("pipeline", pipeline),
             ("fixed_overhead", fixed_overhead),
             ("accuracy", None if accuracy == "standard" else accuracy)),
            (num_parts, row_tile, fixed_split_tokens),
        )  # fmt: skip
    options = SparseOptions(
        num_heads=num_heads, num_parts=num_parts, pipeline=pipeline, row_tile=row_tile,
        fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
        check_stale=check_stale, accuracy=accuracy, format=rank.sparse_cache_name(value, name),
    )  # fmt: skip
    topk = checks.integer("topk", topk, 1, MAX_TOPK)
    lengths = sparse_lengths(topk_length, batch, device, topk)
    return plan_sparse(
        options, topk, s_q, lengths, cu_seqlens_q=cu_seqlens_q, total_q=total_q,
        full=topk_length is None,
    )  # fmt: skip


def _plan_of_rows(
    num_heads: int,
    s_q: int | None,
    topk: int,
    topk_length: torch.Tensor | None,
    batch: int | None,
    device: torch.device | str | int | None,
    check_stale: bool | None,
    others: tuple[tuple[str, object], ...],
    options: tuple[int | None, int | None, int | None],
) -> SparseRowsPlan:
    """``plan_sparse_decode`` of a BF16 cache.

    Args:
        others: arguments that its kernel has no use for, by name.
        options: num_parts, row_tile, fixed_split_tokens.
    """
    for name, value in others:
        if value is not None:
            hint = "ragged query tokens are sequences of one token there"
            hint = hint if name in ("cu_seqlens_q", "total_q") else ""
            got = "a tensor" if isinstance(value, torch.Tensor) else value
            wanted = "'standard'" if name == "accuracy" else "None"
            checks.value_error(name, f"{wanted} with a BF16 cache", got, hint)
    if check_stale is not None:
        checks.flag("check_stale", check_stale)  # such a plan is never stale
    if topk_length is not None:
        checked = sparse_lengths(topk_length, batch, device, 1)
        batch, device = checked.shape[0], checked.device
    elif batch is None:
        checks.type_error("batch", "an int", "None", "it is topk_length that says it otherwise")
    if s_q is None:
        checks.type_error("s_q", "an int", "None")
    parts, row_tile, width = options
    return plan_rows(
        num_heads, s_q, topk=topk, batch=batch, device="cuda" if device is None else device,
        num_parts=parts, row_tile=row_tile, fixed_split_tokens=width,
    )  # fmt: skip


def sparse_lengths(
    topk_length: torch.Tensor | None,
    batch: int | None,
    device: torch.device | str | int | None,
    topk: int,
) -> torch.Tensor:
    """int32 (b,): the caller's, or ``topk`` for each sequence."""
    if topk_length is not None:
        checks.tensor("topk_length", topk_length, (torch.int32,), ("b",))
        checks.contiguous("topk_length", topk_length)
        if batch is not None and batch != topk_length.shape[0]:
            checks.value_error("batch", f"{topk_length.shape[0]}, as topk_length", batch)
        where = None if device is None else checks.device("device", device)
        if where is not None and where.type != topk_length.device.type:
            checks.value_error("device", f"{topk_length.device}, as topk_length", where)
        return topk_length
    if batch is None:
        checks.type_error("batch", "an int", "None", "it is topk_length that says it otherwise")
    batch = checks.integer("batch", batch, 0)
    where = checks.device("device", "cuda" if device is None else device)
    return torch.full((batch,), topk, dtype=torch.int32, device=where)
