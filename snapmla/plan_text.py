"""``DecodePlan.explain``: a plan as text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snapmla import checks

if TYPE_CHECKING:
    from snapmla.plan import DecodePlan

Item = tuple[int, int, int, int]  # sequence, first tile, end tile, slot


def explain(plan: DecodePlan, limit: int) -> str:
    """The text of ``DecodePlan.explain``; at most ``limit`` sequences and parts are listed."""
    checks.integer("limit", limit, 0)
    everything: list[Item] = [tuple(row) for row in plan.work_items.tolist()]
    begin, slots_of = plan.part_begin.tolist(), plan.split_begin.tolist()
    damage = list(_damage(plan, everything, begin, slots_of))
    if damage:
        shown = [f"  {line}" for line in damage[: max(limit, 1)]]
        head = "decode plan: its tables are damaged (plan.update_ writes them anew)"
        return "\n".join([head, *shown, *_rest(len(damage), max(limit, 1), "entries")])
    items = everything[: begin[-1]]
    parts = [items[x:y] for x, y in itertools.pairwise(begin)]
    costs = [sum(end - first + plan.fixed_overhead for _, first, end, _ in p) for p in parts]
    busy = [cost for cost in costs if cost]
    lines = [
        f"decode plan: {plan.batch} sequences, {plan.num_heads} heads x {plan.s_q} query tokens, "
        f"pipeline {plan.pipeline}, row tile {plan.row_tile}, on {plan.device}",
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
        + ("runs for split sequences" if plan.may_split else "is never launched")
    )
    return "\n".join(lines + _sequences(plan, parts, limit) + _parts(parts, costs, limit))


def _damage(
    plan: DecodePlan, items: list[Item], begin: list[int], slots_of: list[int]
) -> Iterator[str]:
    """What no planning kernel writes: entries out of range or out of order."""
    for name, values, most in (
        ("part_begin", begin, len(items)),
        ("split_begin", slots_of, plan.o_accum.shape[0]),
    ):
        for i, (value, least) in enumerate(zip(values, [0, *values])):
            if not least <= value <= most or (i == 0 and value):
                wanted = f"{least} to {most}" if i else "0"
                yield f"{name}[{i}] is {value}, expected {wanted}"
    slots = plan.o_accum.shape[0]
    for i, (batch, first, end, slot) in enumerate(items[: max(begin[-1], 0)]):
        if not 0 <= batch < plan.batch:
            yield f"work_items[{i}] is of sequence {batch}, expected 0 to {plan.batch - 1}"
        elif not 0 <= first <= end:
            yield f"work_items[{i}] has tiles {first}..{end}, expected an ascending range"
        elif not -1 <= slot < slots:
            yield f"work_items[{i}] has slot {slot}, expected -1 to {slots - 1}"
    known = {item[0] for item in items[: max(begin[-1], 0)]}
    for i in range(plan.batch):
        if i not in known:
            yield f"no item is of sequence {i}"


def _rule(plan: DecodePlan) -> str:
    if plan.split_tiles:
        size = plan.split_tiles * plan.token_tile
        return f"every sequence is cut after each {size} tokens (batch-invariant)"
    return "sequences are cut so that the costliest part costs as little as possible"


def _sequences(plan: DecodePlan, parts: list[list[Item]], limit: int) -> list[str]:
    """One line a sequence: tokens, items, the parts that work on it."""
    workers: dict[int, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        for item in part:
            workers[item[0]].append(number)
    lengths, capacity = plan.planned_seqlens.tolist(), plan.max_pages * plan.page_size
    lines = []
    for i, length in list(enumerate(lengths))[:limit]:
        own = workers[i]
        clamped = f" (clamped to {capacity})" if length > capacity else ""
        who = f"part {own[0]}" if own[0] == own[-1] else f"parts {own[0]} to {own[-1]}"
        how = "written directly" if len(own) == 1 else f"{len(own)} pieces, merged"
        lines.append(f"  sequence {i}: {length} tokens{clamped}, {who}, {how}")
    return lines + _rest(len(lengths), limit, "sequences")


def _parts(parts: list[list[Item]], costs: list[int], limit: int) -> list[str]:
    """One line a part: its items."""
    lines = []
    for number, part in list(enumerate(parts))[:limit]:
        texts = [
            f"sequence {batch} tiles {first}..{end}" + (f" -> slot {slot}" if slot >= 0 else "")
            for batch, first, end, slot in part[:limit]
        ] + _rest(len(part), limit, "items", "")
        lines.append(f"  part {number}: cost {costs[number]}: {', '.join(texts) or 'idle'}")
    return lines + _rest(len(parts), limit, "parts")


def _rest(count: int, limit: int, what: str, indent: str = "  ") -> list[str]:
    return [f"{indent}... and {count - limit} more {what}"] if count > limit else []
