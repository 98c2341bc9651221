"""``DecodePlan.explain``: a plan as text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsl_kernels.formats.registered import FORMATS
from snapmla import checks

if TYPE_CHECKING:
    from snapmla.dense import DecodePlan

# sequence, first tile, end tile, slot, first row, end row of the sequence, first hidden token, 0
Item = tuple[int, ...]


def explain(plan: DecodePlan, limit: int) -> str:
    """The text of ``DecodePlan.explain``; at most ``limit`` sequences and parts are listed."""
    checks.integer("limit", limit, 0)
    everything: list[Item] = [tuple(row) for row in plan.work_items.tolist()]
    units = plan.unit_begin.tolist() or _even(plan)
    begin, slots_of = plan.part_begin.tolist(), plan.split_begin.tolist()
    damage = list(_damage(plan, everything, begin, slots_of, units))
    if damage:
        shown = [f"  {line}" for line in damage[: max(limit, 1)]]
        head = "decode plan: its tables are damaged (plan.update_ writes them anew)"
        return "\n".join([head, *shown, *_rest(len(damage), max(limit, 1), "entries")])
    items = everything[: begin[-1]]
    parts = [items[x:y] for x, y in itertools.pairwise(begin)]
    costs = [sum(item[2] - item[1] + plan.fixed_overhead for item in p) for p in parts]
    busy = [cost for cost in costs if cost]
    lines = [
        f"decode plan: {plan.batch} sequences, {plan.num_heads} heads x {_tokens(plan)}, "
        f"pipeline {plan.pipeline}, row tile {plan.row_tile}, on {plan.device}"
        + ("" if plan.p_terms == 1 else f", {plan.p_terms} terms of P")
        + ("" if FORMATS[plan.cache_dtype].one_scale else f", {plan.cache_dtype} cache"),
        *_kv_heads(plan),
        *_units(plan, units),
        _rule(plan),
        f"{len(items)} items in {len(busy)} of {plan.num_parts} parts; an item costs its "
        f"{plan.token_tile}-token tiles + {plan.fixed_overhead}",
    ]
    if busy:
        mean = sum(costs) / plan.num_parts
        lines.append(
            f"cost of a part: largest {max(busy)}, smallest busy {min(busy)}, mean over all "
            f"{mean:.1f}; balance {100 * mean / max(busy):.0f} %"
        )
    slots = slots_of[-1]
    lines.append(
        f"{slots} of {plan.o_accum.shape[0]} slots in use, workspace "
        f"{plan.workspace_bytes / 1e6:.1f} MB; merge "
        + ("runs for split sequences" if plan.merges else "is never launched")
    )
    shown = _sequences(plan, parts, units, limit) + _parts(plan, parts, costs, limit)
    return "\n".join(lines + shown)


def _even(plan: DecodePlan) -> list[int]:
    """First unit of each sequence, and their number, where all have the same."""
    each = plan.n_units // max(plan.sequences, 1)
    return [i * each for i in range(plan.sequences + 1)]


def _kv_heads(plan: DecodePlan) -> list[str]:
    """Line that says which KV head a sequence of the tables is, if there are several."""
    if plan.num_kv_heads == 1:
        return []
    return [
        f"{plan.num_kv_heads} KV heads, each read by {plan.group} heads: below, sequence i is KV "
        f"head i % {plan.num_kv_heads} of sequence i // {plan.num_kv_heads}"
    ]


def _tokens(plan: DecodePlan) -> str:
    if plan.s_q is None:
        return f"ragged query tokens, {plan.total_q} at most"
    return f"{plan.s_q} query tokens"


def _units(plan: DecodePlan, units: list[int]) -> list[str]:
    """Lines about units that are not whole sequences, and about tokens that rows see."""
    lines = []
    if plan.units.shape[0]:
        lines.append(
            f"{units[-1]} units of {plan.unit_rows} query rows, each scheduled for itself; a "
            f"sequence has up to {max(y - x for x, y in itertools.pairwise(units))}"
        )
    if plan.row_limits.shape[0]:
        lines.append("each query token sees as many tokens as row_seqlens says")
    elif not plan.causal:
        lines.append("no tile is left out that the causal rule would hide")
    return lines


def _damage(
    plan: DecodePlan, items: list[Item], begin: list[int], slots_of: list[int], units: list[int]
) -> Iterator[str]:
    """Yields a sentence for each entry out of range or order, which no planning kernel writes."""
    for name, values, most in (
        ("part_begin", begin, len(items)),
        ("split_begin", slots_of, plan.o_accum.shape[0]),
        *([("unit_begin", units, plan.n_units)] if plan.ragged else []),
    ):
        for i, (value, least) in enumerate(zip(values, [0, *values])):
            if not least <= value <= most or (i == 0 and value):
                wanted = f"{least} to {most}" if i else "0"
                yield f"{name}[{i}] is {value}, expected {wanted}"
    slots = plan.o_accum.shape[0]
    used, rows = items[: max(begin[-1], 0)], plan.total_q * plan.num_heads
    batches = plan.sequences
    for i, (batch, first, end, slot, row, end_row, *_) in enumerate(used):
        if not 0 <= batch < batches:
            yield f"work_items[{i}] is of sequence {batch}, expected 0 to {batches - 1}"
        elif not 0 <= first <= end:
            yield f"work_items[{i}] has tiles {first}..{end}, expected an ascending range"
        elif not -1 <= slot < slots:
            yield f"work_items[{i}] has slot {slot}, expected -1 to {slots - 1}"
        elif not 0 <= row < end_row <= rows:
            yield f"work_items[{i}] has rows {row}..{end_row}, expected a range within {rows}"
    known = {item[0] for item in used}
    for i, (first, end) in enumerate(itertools.pairwise(units)):
        if i not in known and first < end:
            yield f"no item is of sequence {i}"


def _rule(plan: DecodePlan) -> str:
    if plan.split_tiles:
        size = plan.split_tiles * plan.token_tile
        return f"every sequence is cut after each {size} tokens (batch-invariant)"
    return "sequences are cut so that the costliest part costs as little as possible"


def _sequences(
    plan: DecodePlan, parts: list[list[Item]], units: list[int], limit: int
) -> list[str]:
    """One line a sequence: tokens, units, items, the parts that work on it."""
    workers: dict[int, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        for item in part:
            workers[item[0]].append(number)
    lengths, capacity = plan.planned_seqlens.tolist(), plan.max_pages * plan.page_size
    lines = []
    for i, length in list(enumerate(lengths))[:limit]:
        own, count = workers[i], units[i + 1] - units[i]
        clamped = f" (clamped to {capacity})" if length > capacity else ""
        if not count:
            lines.append(f"  sequence {i}: {length} tokens{clamped}, no query tokens")
            continue
        who = f"part {own[0]}" if own[0] == own[-1] else f"parts {own[0]} to {own[-1]}"
        how = "written directly" if len(own) == count else f"{len(own)} pieces, merged"
        several = f"{count} units, " if count > 1 else ""
        lines.append(f"  sequence {i}: {length} tokens{clamped}, {several}{who}, {how}")
    return lines + _rest(len(lengths), limit, "sequences")


def _parts(plan: DecodePlan, parts: list[list[Item]], costs: list[int], limit: int) -> list[str]:
    """One line a part: its items."""
    lines = []
    for number, part in list(enumerate(parts))[:limit]:
        texts = [_item(plan, item) for item in part[:limit]]
        texts += _rest(len(part), limit, "items", "")
        lines.append(f"  part {number}: cost {costs[number]}: {', '.join(texts) or 'idle'}")
    return lines + _rest(len(parts), limit, "parts")


def _item(plan: DecodePlan, item: Item) -> str:
    batch, first, end, slot, row, end_row, *_ = item
    rows = ""
    if plan.units.shape[0]:
        rows = f" rows {row}..{min(row + plan.unit_rows, end_row)}"
    where = f" -> slot {slot}" if slot >= 0 else ""
    return f"sequence {batch}{rows} tiles {first}..{end}{where}"


def _rest(count: int, limit: int, what: str, indent: str = "  ") -> list[str]:
    return [f"{indent}... and {count - limit} more {what}"] if count > limit else []
