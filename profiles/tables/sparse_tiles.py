"""Row tiles and cuts of sparse decode by size, beside what the dispatcher chooses, on one GPU:
``python -m profiles.bench sparse_tiles``.

Query tokens x heads x entries over both caches of ``sparse_cost``: every row tile, with lists cut
so that all parts have equal shares, and whole (where that is not the same), and the plan that a
call gets by itself.  *Regret* is its time over the least of all.  The dispatcher's times are fitted
to the table (``profiles.dispatch_data``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from dsl_kernels.families.sparse_decode import ROW_TILES as TILES_OF
from dsl_kernels.formats.dims import TOKEN_TILE
from profiles import table
from profiles.table import Row, Table
from profiles.tables import sparse_cost
from profiles.tables.sparse_cost import CACHES, Caches, Problem, index_sets, planned
from profiles.timing import Call
from snapmla.rank import Load, parts_of_lists
from snapmla.runtime.launch import sm_count
from snapmla.sparse.plan import sparse_spec

TOKENS, HEADS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (16, 32, 64, 128)
ENTRIES = (512, 2048)
MOST = 128 * 2048 * 128  # tokens x entries x heads: larger work is not in question
CHOSEN = "chosen"
ROW_TILES = TILES_OF["mix16"]
SHAPES = [  # query tokens, heads, entries, cache
    (tokens, heads, entries, name)
    for entries, heads, tokens in itertools.product(ENTRIES, HEADS, TOKENS)
    if tokens * heads * entries <= MOST
    for name in CACHES
]


def candidates(name: str, shape: tuple[int, int, int], sms: int) -> dict[str, dict[str, Any]]:
    """Options of ``plan_sparse_decode`` by row tile and cut, those that differ; by ``CHOSEN``."""
    tokens, heads, entries = shape
    full = -(-entries // TOKEN_TILE) * TOKEN_TILE
    found: dict[str, dict[str, Any]] = {CHOSEN: {}}
    for tile in ROW_TILES:
        if tile >= 2 * heads:
            continue
        spec = sparse_spec("sm_90a", tile, "bf16", cache=CACHES[name])
        load = Load(tokens, parts_of_lists(sms, heads, tokens, spec), full // TOKEN_TILE)
        for share in load.shares():
            how = {"num_parts": load.parts} if share.cut else {"fixed_split_tokens": full}
            found[f"{tile} {'cut' if share.cut else 'whole'}"] = {"row_tile": tile, **how}
    return found


def problem(caches: Caches, shape: tuple[int, int, int, str]) -> Problem:
    """All candidates over a cache."""
    tokens, heads, entries, name = shape
    cache = caches[name]
    x = torch.randn(tokens, 1, heads, 576, device=cache.device).bfloat16()
    sets = index_sets(cache.device, tokens, 1, entries)
    ways = candidates(name, (tokens, heads, entries), sm_count(cache.device))
    found = [planned(how, cache, x, sets, **options) for how, options in ways.items()]
    plan = found[0].plan
    chosen = f"{plan.row_tile}, {'whole' if plan.split_tiles else f'{plan.num_parts} parts'}"
    facts = {"shape": f"{tokens} × {heads} × {entries}", "cache": name, "plan": chosen}
    return OfOne(facts, found, x)


class OfOne(Problem):
    """Over one cache: errors are told over its gate in ``sparse_cost``."""

    def check(self, name: str, calls: Sequence[Call]) -> float:
        return super().check(name, calls) / sparse_cost.GATES[self.told["cache"]]


def best(row: Row) -> str:
    """The fastest of those that were told how to."""
    return min((how for how in row["us"] if how != CHOSEN), key=row["us"].__getitem__)


TABLES = (
    Table(
        "sparse_tiles", "Row tiles and cuts of sparse decode by size", problem, SHAPES,
        (
            table.fact("cache", "cache"), table.fact("tokens × heads × entries", "shape"),
            *(table.us(f"{tile} {how}") for tile in ROW_TILES for how in ("cut", "whole")),
            table.fact("chosen", "plan"), table.us(CHOSEN, "its µs"), ("least", best),
            ("regret", lambda row: f"{row['us'][CHOSEN] / row['us'][best(row)]:.2f}"),
        ),
        sparse_cost.CONFIG,
        notes=("µs a call in a graph; row tile, and how lists are cut",),
        setup=sparse_cost.own_caches, gate=2.0,
    ),
)  # fmt: skip
