"""``ContextPlan``: what one step of context-parallel decode needs, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache.quant import QuantizedQuery
from snapmla.checks.tensors import FP8
from snapmla.dense import DecodePlan
from snapmla.parallel.exchange import Arena, Exchange, Rows, make_exchange
from snapmla.parallel.sharding import Sharding
from snapmla.runtime import launch

if TYPE_CHECKING:
    from snapmla.parallel.group import ContextGroup

Tensor = torch.Tensor
Query = QuantizedQuery | Tensor


class Buffers:
    """Memory of a step between its collectives; the layers of a step share it.

    Attributes:
        send: bfloat16 (*tokens, own, 576), this rank's queries; gathered: (ranks, *tokens, own,
            576); joint: (*tokens, heads, 576), all heads of a token together.  None where queries
            are replicated, but for ``joint`` of a 16-bit cache.
        joined: whether ``gathered`` is ``joint``: of a single token all heads lie together.
        quantized: the query of an FP8 cache; None of a 16-bit cache.
        part, part_lse: this rank's partial result.
        exchange: makes partial results whole.
    """

    def __init__(self, group: ContextGroup, rows: Rows, cache_dtype: str, arena: Arena) -> None:
        tokens, heads, bf16 = rows.tokens, rows.heads, torch.bfloat16
        fp8 = FORMATS[cache_dtype].quantized_query
        self.send = self.gathered = self.joint = None
        self.joined = group.heads == "gathered" and math.prod(tokens) == 1
        if group.heads == "gathered":
            self.send = arena.take(*tokens, rows.own, HEAD_DIM_QK, dtype=bf16)
            self.gathered = arena.take(rows.ranks, *self.send.shape, dtype=bf16)
            self.joint = self.gathered.view(*tokens, heads, HEAD_DIM_QK) if self.joined else None
        if self.joint is None and (group.heads == "gathered" or not fp8):
            self.joint = arena.take(*tokens, heads, HEAD_DIM_QK, dtype=bf16)
        self.quantized = None
        if fp8:
            nope = arena.take(*tokens, heads, KV_LORA_RANK, dtype=FP8)
            rope = arena.take(*tokens, heads, QK_ROPE_HEAD_DIM, dtype=bf16)
            scale = arena.take(*tokens, heads, dtype=torch.float32)
            if arena.workspace is not None:
                self.quantized = QuantizedQuery(nope, rope, scale)
        # weighted rows are rounded once, so they are computed from float32
        exact = group.method == "reduce_scatter" or group.transport is torch.float32
        part = torch.float32 if fp8 and exact else bf16
        self.part = arena.take(*tokens, heads, KV_LORA_RANK, dtype=part)
        self.part_lse = arena.take(*rows.lse_shape(heads), dtype=torch.float32)
        self.exchange: Exchange = make_exchange(group.method, rows, group.collectives, arena.take)


class Lengths(NamedTuple):
    """The arithmetic of a step's lengths: where it writes, and what it needs for that.

    Attributes:
        local, limits: ``cache_seqlens`` and ``row_seqlens`` of a ``ContextPlan``.
        scratch: int32 (b,). rows, sequence: int32, as many as query tokens.
        order: int32, how many query tokens of a sequence are behind each; of ragged ones 0, 1, 2.
    """

    sharding: Sharding
    local: Tensor
    limits: Tensor | None
    scratch: Tensor
    rows: Tensor
    sequence: Tensor
    order: Tensor

    def update_(self, cache_seqlens: Tensor, cu_seqlens_q: Tensor | None) -> None:
        """Writes local lengths and limits for whole sequences of these lengths."""
        sharding = self.sharding
        sharding.lengths_(cache_seqlens, self.local, self.scratch)
        if self.limits is None or not cache_seqlens.shape[0]:
            return
        if cu_seqlens_q is None:
            sharding.rows_(cache_seqlens, self.order, self.limits, self.rows)
        else:
            sharding.ragged_rows_(
                cache_seqlens, cu_seqlens_q, self.order, self.limits, self.rows, self.sequence
            )


def scratch_of(like: Tensor, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of ``Lengths`` behind ``limits``, for lengths like these."""
    rows, last = like.new_zeros(tokens), tokens[-1]
    order = torch.arange(last, dtype=torch.int32, device=like.device)
    order = order if len(tokens) == 1 else order.flip(0)
    return torch.zeros_like(like), rows, torch.zeros_like(rows), order


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan:
    """A step of context-parallel decode: made by ``ContextGroup.plan_decode``, shared by layers.

    Attributes:
        group: whose ranks take part.
        plan: of this rank's decode of its own tokens.
        cache_seqlens: int32 (b,), how many tokens of each sequence this rank holds; 0 is fine.
        row_seqlens: int32 (b, s_q) or (total_q,), how many of them each query token sees; None
            with one query token a sequence, which sees them all.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: our own; the rule of turns is that of vLLM's and SGLang's context parallelism.
    """

    group: ContextGroup
    plan: DecodePlan
    cache_seqlens: Tensor
    row_seqlens: Tensor | None
    _lengths: Lengths
    _buffers: Buffers

    @property
    def tokens(self) -> tuple[int, ...]:
        """(b, s_q), or (total_q,) with ragged queries."""
        plan = self.plan
        return (plan.total_q,) if plan.s_q is None else (plan.batch, plan.s_q)

    def update_(self, cache_seqlens: Tensor, cu_seqlens_q: Tensor | None = None) -> ContextPlan:
        """Plans anew for other lengths, in place: no synchronisation, no allocation, no collective.

        A graph may hold it.  Every rank updates its plan before the step.

        Args:
            cache_seqlens: int32 (b,), tokens of the *whole* sequences, the new ones included.
            cu_seqlens_q: int32 (b + 1,), with ragged queries.

        Returns:
            This plan.

        Raises:
            TypeError, ValueError: naming the argument.

        Source: our own.
        """
        _check_ragged(self.plan.s_q is None, cu_seqlens_q)
        checks.lengths(cache_seqlens, self.plan.batch, self.cache_seqlens.device)
        self._lengths.update_(cache_seqlens, cu_seqlens_q)
        self.plan.update_(self.cache_seqlens, cu_seqlens_q, self.row_seqlens)
        self._watch(cache_seqlens)
        return self

    def _watch(self, cache_seqlens: Tensor) -> None:
        """With ``check_stale``: keeps the whole lengths by reference, and what they hold now."""
        if self.plan.check_stale:
            object.__setattr__(self, "_whole", (cache_seqlens, cache_seqlens.clone()))

    def _expect_fresh(self) -> None:
        """ValueError if the whole lengths of the last ``update_`` were rewritten since; only with
        ``check_stale``, as it waits for the device."""
        now, planned = self.__dict__.get("_whole", (None, None))
        if now is None or (now.device.type == "cuda" and launch.capturing(now.device)):
            return
        changed = (now != planned).nonzero().flatten().tolist()
        if changed:
            got = f"other tokens (planned -> now) in sequence {changed[0]} "
            got += f"({int(planned[changed[0]])} -> {int(now[changed[0]])})"
            hint = "call plan.update_(cache_seqlens) once after the lengths change"
            checks.value_error("plan", "the lengths it was last updated for", got, hint)

    def __repr__(self) -> str:
        return f"ContextPlan({self.group!r}: tokens {self.tokens}, {self.plan!r})"


def _check_ragged(ragged: bool, cu_seqlens_q: Tensor | None) -> None:
    if ragged != (cu_seqlens_q is not None):
        wanted = "a tensor: the plan is ragged" if ragged else "None: the plan is not ragged"
        got = "None" if ragged else "a tensor"
        checks.value_error("cu_seqlens_q", wanted, got, "make another plan for the other form")
