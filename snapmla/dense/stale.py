"""Comparison of a plan with the tensors of a step: what moved since the plan's last ``update_``.

It reads tables back, so it waits for the device: a debugging aid (``check_stale``).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from snapmla import checks
from snapmla.dense import kv_heads

if TYPE_CHECKING:
    from snapmla.dense.plan import DecodePlan

STALE_SHOWN = 8  # changed sequences that an error names


def compare(
    plan: DecodePlan,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    row_seqlens: Tensor | None,
) -> None:
    """Raises ValueError if the plan was last updated for other values.

    Args:
        cu_seqlens_q, row_seqlens: None compares nothing.
    """
    lengths = plan.planned_seqlens[:: plan.num_kv_heads]
    changed = (cache_seqlens != lengths).nonzero().flatten().tolist()
    if changed:
        now, planned = cache_seqlens.tolist(), lengths.tolist()
        shown = [f"{i} ({planned[i]} -> {now[i]})" for i in changed]
        _refuse(plan, "the lengths", "other tokens (planned -> now) in sequence", shown)
    if cu_seqlens_q is not None and not plan.idle:
        _compare_offsets(plan, cu_seqlens_q)
    if row_seqlens is not None and not plan.idle:
        _compare_limits(plan, cache_seqlens, cu_seqlens_q, row_seqlens)


def _refuse(plan: DecodePlan, wanted: str, got: str, shown: list[str]) -> None:
    """ValueError that names the first of what changed."""
    if len(shown) > STALE_SHOWN:
        shown = [*shown[:STALE_SHOWN], f"{len(shown) - STALE_SHOWN} more"]
    name, hint = plan._STALE
    checks.value_error(name, f"{wanted} it was last updated for", f"{got} {', '.join(shown)}", hint)


def planned_tokens(plan: DecodePlan) -> list[tuple[int, int] | None]:
    """(first, end) query token of each sequence in a ragged plan's tables; None: it has none."""
    begin, rows = plan.unit_begin.tolist(), (plan.units // plan.group).tolist()
    heads = plan.num_kv_heads
    found: list[tuple[int, int] | None] = []
    for i in range(plan.batch):
        unit, after = begin[i * heads], begin[i * heads + 1]
        if after > unit:
            first, end = rows[unit]
            found.append((first // heads, first // heads + end - first))
        else:
            found.append(None)
    return found


def tokens_of(plan: DecodePlan, cu_seqlens_q: Tensor) -> list[tuple[int, int] | None]:
    """The same by offsets, clamped as the planning kernel clamps them."""
    offsets, total, found = cu_seqlens_q.tolist(), plan.total_q, []
    for begin, behind in itertools.pairwise(offsets):
        first = min(max(begin, 0), total)
        end = min(max(behind, first), total)
        found.append((first, end) if end > first else None)
    return found


def _compare_offsets(plan: DecodePlan, cu_seqlens_q: Tensor) -> None:
    planned, now = planned_tokens(plan), tokens_of(plan, cu_seqlens_q)
    shown = [
        f"{i} ({_span(was)} -> {_span(own)})"
        for i, (was, own) in enumerate(zip(planned, now))
        if was != own
    ]
    if shown:
        got = "other query tokens (planned -> now) of sequence"
        _refuse(plan, "the cu_seqlens_q", got, shown)


def _span(tokens: tuple[int, int] | None) -> str:
    return "none" if tokens is None else f"[{tokens[0]}, {tokens[1]})"


def _compare_limits(
    plan: DecodePlan, cache_seqlens: Tensor, cu_seqlens_q: Tensor | None, row_seqlens: Tensor
) -> None:
    limits, heads = row_seqlens.reshape(-1), plan.num_kv_heads
    if heads > 1:
        _, _, expanded = kv_heads.lengths(plan, cache_seqlens, cu_seqlens_q, row_seqlens)
        assert expanded is not None  # row_seqlens are there
        limits = expanded
    differs = limits != plan.row_limits
    if cu_seqlens_q is not None:  # what lies behind the last query token is nobody's
        differs[int(cu_seqlens_q[-1].clamp(0, plan.total_q)) * heads :] = False
    changed = differs.nonzero().flatten().tolist()
    if changed:
        was, now = plan.row_limits.tolist(), limits.tolist()
        shown = [f"{i // heads} ({was[i]} -> {now[i]})" for i in changed]
        name = plan._ROWS
        _refuse(plan, f"the {name}", "other limits (planned -> now) of query token", shown)
