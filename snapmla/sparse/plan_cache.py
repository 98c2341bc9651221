"""``SparsePlanCache``: the sparse plans of an engine, one for each shape of step."""

from __future__ import annotations

from typing import ClassVar

import torch

from snapmla import checks, rank
from snapmla.call import tracing
from snapmla.dense import DecodePlan
from snapmla.dense.plan_cache import COUNT, MOST_UNPINNED, Key, Plans, counted
from snapmla.dense.plan_decode import StepShape
from snapmla.sparse.plan import AS_PLANNED, MAX_TOPK, SparseOptions, SparsePlan, sparse_lengths

LENGTHS, OWN = 1, 2  # bits of a key: a shape's plans have lengths, of each query token as well


class SparsePlanCache(Plans[SparsePlan]):
    """``PlanCache`` for ``decode(..., indices=)``: plans by shape of step, made on first use,
    updated in place from then on.

    An engine keeps one for each stream of steps and asks it once a step; the plan serves all
    layers.  Results are those of ``plan_sparse_decode`` with the same arguments.

    Shape: the batch, ``s_q`` (with ragged queries ``total_q``), ``topk``, and which lengths there
    are: ``topk_length``, ``row_lengths``.  What they hold stays on the device.

    Graphs, memory, threads, copies, tracing: as of ``PlanCache``.

    Args:
        num_heads: 1 to 128.
        device: of all tensors; ``cpu`` is the software GPU.
        capacity: plans that are kept without being pinned, 1 or more.
        num_parts, pipeline, row_tile, fixed_overhead, fixed_split_tokens, check_stale, accuracy,
            format, cache_dtype: of all plans, as in ``plan_sparse_decode``.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: no kernel for sparse decode exists for the device.

    Example:
        plans = snapmla.SparsePlanCache(16, device="cpu")
        plan = plans.get(None, 1, topk=64, batch=2)
        assert plans.get(None, 1, topk=64, batch=2) is plan

    Source: as ``PlanCache``.
    """

    _made: ClassVar[type[DecodePlan]] = SparsePlan
    _extents: ClassVar[tuple[str, ...]] = ("b", "s_q", "topk", "total_q")
    _limits: ClassVar[tuple[str, ...]] = (
        "", ", topk_length", ", row_lengths", ", topk_length, row_lengths",
    )  # fmt: skip

    def __init__(
        self,
        num_heads: int,
        *,
        device: torch.device | str | int = "cuda",
        capacity: int = MOST_UNPINNED,
        num_parts: int | None = None,
        pipeline: str | None = None,
        row_tile: int | None = None,
        fixed_overhead: int | None = None,
        fixed_split_tokens: int | None = None,
        check_stale: bool | None = None,
        accuracy: str = "standard",
        cache_dtype: str | torch.dtype = checks.UNSAID,
        format: str | torch.dtype | None = None,
    ) -> None:
        name, value = checks.given_format(format, cache_dtype)
        options = SparseOptions(
            num_heads=num_heads, num_parts=num_parts, pipeline=pipeline, row_tile=row_tile,
            fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
            check_stale=check_stale, accuracy=accuracy,
            format=rank.sparse_cache_name(value, name),
        )  # fmt: skip
        super().__init__(options, device, capacity)
        # of shapes without ``topk_length``, by (batch, topk): what stands for it
        self._whole: dict[tuple[int, int], torch.Tensor] = {}

    def get(
        self,
        topk_length: torch.Tensor | None = None,
        s_q: int | None = None,
        *,
        topk: int,
        batch: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        total_q: int | None = None,
        row_lengths: torch.Tensor | None = None,
        pin: bool = False,
    ) -> SparsePlan:
        """The plan for a step of this shape, updated for these lengths.

        For a shape that the cache holds this is ``plan.update_``, or nothing at all where the shape
        says everything: ``s_q`` without lengths.  A new one is planned as by
        ``plan_sparse_decode``.

        While the current stream is captured, the update is recorded: every replay plans anew from
        what ``topk_length`` and the other tables hold by then.  A shape that the cache does not
        hold is refused there, as by ``PlanCache.get``: call ``get`` for it before.

        Args:
            topk_length: int32 (b,): how many entries of each row of a sequence count; None: all.
            s_q: query tokens of every sequence, 1 or more; None with ``cu_seqlens_q``.
            topk: width of the ``indices`` that ``decode`` will get, exactly.
            batch: sequences b, where no ``topk_length`` says it.
            cu_seqlens_q: ragged queries, int32 (b + 1,), as in ``plan_decode``.
            total_q: room for ragged query tokens: the first extent of ``q`` and ``out``.
            row_lengths: int32 (b, s_q), or (total_q,) with ragged queries: how many entries of each
                query token's row count, beside ``topk_length``.
            pin: keep the plan until ``release``: a graph will be captured with it.

        Returns:
            The plan; the same object as long as the cache holds it.

        Raises:
            TypeError, ValueError: naming the argument, or that the shape is new under capture.
            VariantError: the planning kernel is not there.
        """
        if tracing.by_dynamo():
            return tracing.between_graphs(
                self.get, topk_length, s_q, topk=topk, batch=batch, cu_seqlens_q=cu_seqlens_q,
                total_q=total_q, row_lengths=row_lengths, pin=pin,
            )  # fmt: skip
        if pin is not False:
            checks.flag("pin", pin)
        key = self._key(topk_length, s_q, topk, batch, total_q, row_lengths is not None)
        plan = None if key is None else self._find(key, pin)
        if plan is None:
            full = topk_length is None and row_lengths is None
            step = StepShape(s_q, topk, total_q, full)
            with self._lock:  # else another thread's new plan might give up these lengths
                lengths = self._lengths(topk_length, batch, topk)
                try:
                    return self._new(key, step, pin, lengths, cu_seqlens_q, row_lengths)
                except (TypeError, ValueError) as error:
                    raise checks.renamed(error, AS_PLANNED, advise=True) from None
        if topk_length is None:
            if s_q is not None and cu_seqlens_q is None and row_lengths is None:
                return plan
            topk_length = self._whole[plan.batch, plan.topk]
        return plan.update_(topk_length, cu_seqlens_q, row_lengths)

    def _key(
        self,
        topk_length: torch.Tensor | None,
        s_q: int | None,
        topk: int,
        batch: int | None,
        total_q: int | None,
        own: bool,
    ) -> Key | None:
        """Key of a step's plan; None if an argument is wrong, or a tracer's."""
        flags = OWN if own else 0
        if topk_length is not None:
            if topk_length.__class__ not in checks.PLAIN:  # and is (b,), says update_
                return None
            if batch is not None and batch != topk_length.numel():
                checks.value_error("batch", f"{topk_length.numel()}, as topk_length", batch)
            batch, flags = topk_length.numel(), flags | LENGTHS
        elif batch.__class__ is not int:
            if batch is None:
                hint = "it is topk_length that says it otherwise"
                checks.type_error("batch", "an int", "None", hint)
            batch = checks.integer("batch", batch, 0)
        assert batch is not None
        key: Key = (batch, s_q, topk, total_q, flags)
        if topk.__class__ is int and s_q.__class__ in COUNT and total_q.__class__ in COUNT:
            return key
        return counted(key)

    def _lengths(
        self, topk_length: torch.Tensor | None, batch: int | None, topk: int
    ) -> torch.Tensor:
        """Lengths for the plan of a new shape.

        If the caller gives none, the cache makes them and keeps them for updates.  The lock is
        held."""
        topk = checks.integer("topk", topk, 1, MAX_TOPK)
        made = sparse_lengths(topk_length, batch, self._device, topk)
        if topk_length is None and made.__class__ in checks.PLAIN:
            return self._whole.setdefault((made.shape[0], topk), made)
        return made

    def _keep(self, key: Key, plan: SparsePlan, pin: bool) -> None:
        super()._keep(key, plan, pin)
        held = {key[:3:2] for key in (*self._pinned, *self._unpinned) if not key[-1] & LENGTHS}
        self._whole = {shape: x for shape, x in self._whole.items() if shape in held}

    def _model(self) -> str:
        return f"{self._options.num_heads} heads, sparse, {self._options.format} cache"
