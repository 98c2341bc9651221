"""``PlanCache``: the decode plans of an engine, one for each shape of step, over one workspace.

A shape is what a plan's addresses and sizes follow from: batch, query tokens, width of the block
table, and whether query tokens have lengths of their own.  Lengths and offsets are no part of it.

Two tables hold the plans: those that a graph may hold the addresses of, which never leave, and the
rest by last use.  A plan never changes its memory, so a workspace that has become too small for a
new plan is succeeded by another one and lives on as long as a plan of it does.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, Self, TypeVar, cast

import torch

from snapmla import checks
from snapmla.call import tracing
from snapmla.dense import TENSORS, DecodePlan, new_workspace, partial_rows
from snapmla.dense.plan_decode import PlanOptions, StepShape, Workspaces, checked_format, make_plan
from snapmla.runtime import launch

MOST_UNPINNED = 64  # tables of some 10 KB each

# What plans of a cache differ in: batch, s_q, max_pages, total_q, whether there are row_seqlens (of
# sparse plans which lengths there are).  A plain tuple: it is made on every call.
Key = tuple[int, int | None, int, int | None, int]
P = TypeVar("P", bound=DecodePlan)
COUNT = frozenset({int, type(None)})


class Stats(NamedTuple):
    """Contents of a plan cache, as its ``stats`` counts them."""

    plans: int
    pinned: int
    bytes: int


def counted(key: Key) -> Key | None:
    """A key with Python's own numbers, which alone are known by equality: 3.0 and True are equal to
    numbers too, and refused.  None of what is a mistake, or a tracer's."""
    batch, *counts, limited = key
    if any(isinstance(n, bool) or not isinstance(n, (int, type(None))) for n in counts):
        return None
    s_q, max_pages, total_q = (None if n is None else int(n) for n in counts)
    return batch, s_q, cast(int, max_pages), total_q, limited


class Plans(Generic[P]):
    """Base of plan caches: keeps plans by shape, pinned or by last use, over one workspace.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: as ``PlanCache``.
    """

    _made: ClassVar[type[DecodePlan]] = DecodePlan
    # of a key, where an error names a shape: its numbers, and what its last one stands for
    _extents: ClassVar[tuple[str, ...]] = ("b", "s_q", "max_pages", "total_q")
    _limits: ClassVar[tuple[str, ...]] = ("", ", row_seqlens")

    def __init__(
        self, options: PlanOptions, device: torch.device | str | int, capacity: int
    ) -> None:
        self._options = options
        self._capacity = checks.integer("capacity", capacity, 1)
        nothing = torch.empty(0, device=checks.device("device", device))
        self._device = nothing.device  # with its index, as tensors have it
        self._options.kernel(self._device, 1)  # raises now what every plan would
        self._is_cuda = self._device.type == "cuda"
        self._lock = threading.RLock()  # garbage collection may run a finaliser that releases
        self._pinned: dict[Key, P] = {}
        self._unpinned: dict[Key, P] = {}  # the latest used last
        self._buffers = self._room_for(nothing, 0)  # for new plans: o_accum, lse_accum

    @property
    def device(self) -> torch.device:
        """Device that the plans live on."""
        return self._device

    def _find(self, key: Key, pin: bool) -> P | None:
        """A plan that is held, as the latest used; pinned if asked for, or under capture."""
        plan = self._pinned.get(key)  # at every replay: without the lock
        if plan is None:
            pin = pin or self._capturing()
            with self._lock:
                plan = self._unpinned.pop(key, None)
                if plan is not None:
                    (self._pinned if pin else self._unpinned)[key] = plan
        return plan

    def _capturing(self) -> bool:
        """True if the current stream is being captured."""
        return self._is_cuda and launch.capturing(self._device)

    def _new(
        self,
        key: Key | None,
        step: StepShape,
        pin: bool,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        row_seqlens: torch.Tensor | None,
    ) -> P:
        """A plan that was not there; without a key it is not kept."""
        given = (cache_seqlens, step, cu_seqlens_q, row_seqlens)
        checks.lengths(cache_seqlens, "b", self._device)
        if key is None:
            return self._plan(new_workspace, *given)
        # a trace would take views of the shared workspace for constants
        recorded = tracing.wanted(cache_seqlens, cu_seqlens_q, row_seqlens)
        with self._lock:
            plan = self._pinned.get(key) or self._unpinned.get(key)
            if plan is not None:  # another thread was first
                plan.update_(cache_seqlens, cu_seqlens_q, row_seqlens)
            elif self._capturing():
                self._refuse(key)
            else:
                plan = self._plan(new_workspace if recorded else self._workspace, *given)
            if plan.plain:
                self._keep(key, plan, pin)
            return plan

    def _plan(self, workspace: Workspaces, *given: Any) -> P:
        """A new plan, of the cache's class."""
        cache_seqlens, step, cu_seqlens_q, row_seqlens = given
        plan = make_plan(
            self._options, workspace, cache_seqlens, step, cu_seqlens_q, row_seqlens, self._made
        )
        return cast(P, plan)

    def _keep(self, key: Key, plan: P, pin: bool) -> None:
        """Holds a plan as the latest used, and gives up those that are too many; under the lock."""
        self._unpinned.pop(key, None)
        (self._pinned if pin or key in self._pinned else self._unpinned)[key] = plan
        while len(self._unpinned) > self._capacity:
            del self._unpinned[next(iter(self._unpinned))]

    def _refuse(self, key: Key) -> NoReturn:
        """Raises what a shape that is new under capture gets."""
        got = ", ".join(f"{n} = {v}" for n, v in zip(self._extents, key) if v is not None)
        checks.value_error(
            f"{type(self).__name__}.get",
            "a shape that the cache holds, while a graph is captured",
            got + self._limits[key[-1]],
            "call get for it before the capture, with pin=True if more than "
            f"capacity = {self._capacity} shapes are to come",
        )

    def _room_for(self, like: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A workspace of one slot of so many rows."""
        return new_workspace(like, 1, rows, self._options.format)

    def _workspace(
        self, like: torch.Tensor, slots: int, unit_rows: int, format: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Workspace for a new plan: the front of the one that all share; the lock is held."""
        o_accum, lse_accum = self._buffers
        rows, room = slots * unit_rows, lse_accum.shape[1]
        if rows > room:
            self._buffers = o_accum, lse_accum = self._room_for(like, max(rows, 2 * room))
        return (
            o_accum[0, :rows].view(slots, unit_rows, partial_rows(format)[1]),
            lse_accum[0, :rows].view(slots, unit_rows),
        )

    def release(self, plan: P | None = None) -> None:
        """Unpins a plan, or all: no graph that was captured with it will be replayed again.

        It counts as just used, and may be given up from now on.

        Args:
            plan: one that ``get`` has pinned; None for all.

        Raises:
            TypeError, ValueError: ``plan`` is no plan, or not one that is pinned here.
        """
        hint = "release takes what get(..., pin=True), or get under capture, returned"
        if plan is not None and not isinstance(plan, self._made):
            wanted = f"a snapmla.{self._made.__name__} or None"
            checks.type_error("plan", wanted, type(plan).__name__, hint)
        with self._lock:
            found = [k for k, held in self._pinned.items() if plan is None or held is plan]
            if plan is not None and not found:
                checks.value_error("plan", "a plan that is pinned here", "another", hint)
            for key in found:
                self._keep(key, self._pinned.pop(key), pin=False)

    def stats(self) -> Stats:
        """Counts what the cache holds: (plans, pinned, bytes).

        Returns:
            Plans, pinned ones included; those of them that are pinned; bytes of device memory of
            their tables, of their workspaces and of the workspace for new plans.
        """
        with self._lock:
            plans, pinned = (*self._pinned.values(), *self._unpinned.values()), len(self._pinned)
            tensors = (*self._buffers, *(getattr(p, name) for p in plans for name in TENSORS))
            memories = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        return Stats(len(plans), pinned, sum(m.nbytes() for m in memories.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = object.__new__(type(self))
        with self._lock:
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            vars(made).update(copy.deepcopy(state, memo), _lock=threading.RLock())
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        checks.type_error(
            name, f"copy.deepcopy, or another {name} of the same arguments", "pickle or copy.copy",
            "its plans are memory of this process, which two caches must not share",
        )  # fmt: skip

    def __repr__(self) -> str:
        plans, pinned, size = self.stats()
        what = f"{plans} plans, {pinned} pinned, {size / 1e6:.1f} MB"
        return f"{type(self).__name__}({self._model()}, {self._device}: {what})"

    def _model(self) -> str:
        """The model that all plans are for, in words for ``repr``."""
        return f"{self._options.num_heads} heads, pages of {self._options.page_size}"


class PlanCache(Plans[DecodePlan]):
    """Decode plans by shape of step: made on first use, updated in place from then on.

    An engine keeps one for each stream of steps and asks it once a step; the plan serves all
    layers.  Results are those of ``plan_decode`` with the same arguments.

    Shape: the batch, ``s_q`` (with ragged queries ``total_q``), ``max_pages`` and whether there are
    ``row_seqlens``.  Lengths, offsets and limits stay on the device and are no part of it.

    Graphs: a plan that is *pinned* keeps its place and its memory until ``release``.  ``get`` pins
    with ``pin=True``, and whatever it hands out while the current stream is captured.  Other plans
    are given up, the longest unused first, when there are more than ``capacity``.  Keep the cache
    as long as the graphs.

    Memory: all plans share one workspace, which grows with the batch only if there are
    ``fixed_split_tokens``, or of an fp16 cache block tables of more than 16384 tokens.  A plan that
    needs more than there is brings a new one, at least twice as large; older plans stay on theirs.
    So all together take at most four times what the largest plan needs; with the largest shape
    first there is one.  A plan that is given up leaves its tables to the stream on which it was
    made, as every tensor of torch does.

    Threads: calls may come from any; two that ask for one shape get one plan.  What runs on the
    plans is the caller's to order: updates and decodes of one cache belong to one stream, or to
    streams that wait for each other, as they write one workspace.

    Copies: ``copy.deepcopy`` gives a cache of its own, with copies of the plans (pinned ones stay
    pinned) over a copy of the workspace, and plans that are copied along with it are the copy's.
    Graphs go on with the original's memory.  ``copy.copy`` and ``pickle`` are refused.

    Tracing: under ``torch.compile`` ``get`` runs between two graphs.  Where else calls are recorded
    or watched (``make_fx``, dispatch modes) its launch is an operator, as that of ``plan.update_``;
    a plan of stand-ins (FakeTensors) is made each time and not kept.

    Args:
        num_heads: 1 to 128.
        page_size: of the KV cache, in tokens.
        device: of all tensors; ``cpu`` is the software GPU.
        capacity: plans that are kept without being pinned, 1 or more.
        causal, num_parts, pipeline, row_tile, row_blocks, fixed_overhead, fixed_split_tokens,
            check_stale, accuracy, format, cache_dtype, num_kv_heads: of all plans, as in
            ``plan_decode``.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: no decode kernel exists for the device.

    Example:
        plans = snapmla.PlanCache(16, page_size=64, device="cpu")
        lengths = torch.tensor([1000, 64], dtype=torch.int32)
        plan = plans.get(lengths, 1, max_pages=32)
        assert plans.get(lengths + 1, 1, max_pages=32) is plan  # updated in place

    Source: our own; the FlashInfer backends of SGLang and vLLM keep wrappers by captured batch size
    in the same way.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        page_size: int,
        device: torch.device | str | int = "cuda",
        capacity: int = MOST_UNPINNED,
        causal: bool = True,
        num_parts: int | None = None,
        pipeline: str | None = None,
        row_tile: int | None = None,
        row_blocks: str | None = None,
        fixed_overhead: int | None = None,
        fixed_split_tokens: int | None = None,
        check_stale: bool | None = None,
        accuracy: str = "standard",
        cache_dtype: str | torch.dtype = checks.UNSAID,
        num_kv_heads: int = 1,
        format: str | torch.dtype | None = None,
    ) -> None:
        options = PlanOptions(
            num_heads=num_heads, page_size=page_size, causal=causal, num_parts=num_parts,
            pipeline=pipeline, row_tile=row_tile, row_blocks=row_blocks,
            fixed_overhead=fixed_overhead, fixed_split_tokens=fixed_split_tokens,
            check_stale=check_stale, accuracy=accuracy, num_kv_heads=num_kv_heads,
            format=checked_format(format, cache_dtype),
        )  # fmt: skip
        super().__init__(options, device, capacity)

    def get(
        self,
        cache_seqlens: torch.Tensor,
        s_q: int | None = None,
        *,
        max_pages: int,
        cu_seqlens_q: torch.Tensor | None = None,
        total_q: int | None = None,
        row_seqlens: torch.Tensor | None = None,
        pin: bool = False,
    ) -> DecodePlan:
        """The plan for a step of this shape, updated for these lengths.

        For a shape that the cache holds this is ``plan.update_``: in place, nothing waited for, and
        with one KV head one launch that allocates nothing.  A new one is planned as by
        ``plan_decode``.

        While the current stream is captured, the update is recorded: every replay plans anew from
        what ``cache_seqlens`` and the other tables hold by then, so keep them where they are.  A
        shape that the cache does not hold is refused there: its plan would be empty before the
        first replay, in memory that belongs to the graph.  Call ``get`` for it before, which loads
        the planning kernel as well.

        Args:
            cache_seqlens: int32 (b,), tokens in the cache per sequence, the new ones included.
            s_q: query tokens of every sequence, 1 or more; None with ``cu_seqlens_q``.
            max_pages: width of the block table that ``decode`` will get, exactly.
            cu_seqlens_q: ragged queries, int32 (b + 1,), as in ``plan_decode``.
            total_q: room for ragged query tokens: the first extent of ``q`` and ``out``.
            row_seqlens: int32 (b, s_q), or (total_q,) with ragged queries, as in ``plan_decode``.
            pin: keep the plan until ``release``: a graph will be captured with it.

        Returns:
            The plan; the same object as long as the cache holds it.

        Raises:
            TypeError, ValueError: naming the argument, or that the shape is new under capture.
            VariantError: the planning kernel is not there.
        """
        if tracing.by_dynamo():
            return tracing.between_graphs(
                self.get, cache_seqlens, s_q, max_pages=max_pages, cu_seqlens_q=cu_seqlens_q,
                total_q=total_q, row_seqlens=row_seqlens, pin=pin,
            )  # fmt: skip
        if pin is not False:
            checks.flag("pin", pin)
        key: Key | None = None  # a tracer's stand-in has none
        if cache_seqlens.__class__ in checks.PLAIN:  # and is (b,), says update_
            key = (cache_seqlens.numel(), s_q, max_pages, total_q, row_seqlens is not None)
            if not (
                max_pages.__class__ is int and s_q.__class__ in COUNT and total_q.__class__ in COUNT
            ):
                key = counted(key)
        plan = None if key is None else self._find(key, pin)
        if plan is None:
            step = StepShape(s_q, max_pages, total_q)
            return self._new(key, step, pin, cache_seqlens, cu_seqlens_q, row_seqlens)
        return plan.update_(cache_seqlens, cu_seqlens_q, row_seqlens)
